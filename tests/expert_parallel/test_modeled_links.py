"""Backends with a modeled link: Loopback, and the link itself."""

import threading

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_dualpipe.expert_parallel import Link, Local, Loopback, Replay
from moe_dualpipe.expert_parallel.modeled.link import LinkTimer
from moe_dualpipe.models import ModelConfig, MoE, StageOptions

CONFIG = ModelConfig(hidden_size=16, expert_size=12, num_experts=8, experts_per_token=3, init_std=0.3, head_dim=4)


# ---- loopback ----


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_loopback_equals_one_rank_with_copies_of_the_experts(ranks):
    """The single rank holds all experts. Those of rank 0 are repeated for every virtual rank."""
    local, looped = (MoE(CONFIG, ep, 0, StageOptions(seed=1)).double() for ep in (Local(8), Loopback(8, ranks)))
    state = {name: t.repeat(ranks, 1, 1) if t.dim() == 3 else t for name, t in looped.state_dict().items()}
    local.load_state_dict(state)
    x, results = torch.randn(11, 16, dtype=torch.float64), []
    for layer in (local, looped):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        experts = [p.grad.unflatten(0, (-1, 8 // ranks)).sum(0) for p in layer.experts.parameters()]
        results.append([y, leaf.grad, layer.router.logits.weight.grad, *experts])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


def test_loopback_counts_a_row_once_per_destination_rank():
    ep = Loopback(8, 4, Link(gb_per_s=1.0, latency_us=7.0))
    route = ep.prepare(torch.tensor([[0, 1], [2, 3], [0, 7], [6, 7]]))  # ranks: 0 | 1 | 0 and 3 | 3
    message = 3 * 128  # three sent rows: 6 floats, 2 weights and 2 ids in 32 + 16 + 16 bytes, padded to 128
    assert ep.timer.busy_seconds == pytest.approx(7e-6)  # the counts
    x_ND, weights_NK = ep.dispatch(torch.randn(4, 6), route, torch.rand(4, 2)).wait()
    assert x_ND.shape == (5, 6) and weights_NK is not None
    assert ep.timer.busy_seconds == pytest.approx(2 * 7e-6 + message * 1e-9)
    ep.combine(x_ND, route).wait()
    assert ep.timer.busy_seconds == pytest.approx(3 * 7e-6 + (message + 3 * 24) * 1e-9)
    assert route.local_ids_NK.tolist() == [[0, 1], [0, -1], [0, 1], [-1, 1], [0, 1]]


def test_a_replay_takes_the_duration_of_each_kind_of_transfer():
    """In backward the roles change: the backward of a combine is a dispatch."""
    ep = Replay(8, 4, {"dispatch(F)": 1e-4, "combine(F)": 2e-4, "combine(B)": 4e-4, "dispatch(B)": 8e-4}, sms=1)
    route, weights, taken = ep.prepare(torch.tensor([[0, 5], [3, 1]])), torch.rand(2, 2), []
    x_ND, weights_NK = ep.dispatch(torch.randn(2, 6), route, weights).wait()
    transfers = [lambda: ep.combine(x_ND, route), lambda: ep.dispatch(torch.randn(2, 6), route)]
    for transfer in (lambda: None, *transfers, lambda: ep.combine(x_ND, route, weights_NK)):
        before = sum(taken)
        transfer()
        taken.append(ep.timer.busy_seconds - before)
    assert taken == pytest.approx([1e-4, 2e-4, 4e-4, 8e-4])


# ---- links ----


def test_transfers_of_a_link_run_one_after_another():
    now, started = [100.0], threading.Event()

    def sleep(seconds):
        assert started.wait(60)  # the time stands still until both have started
        now[0] += seconds

    timer = LinkTimer(lambda: now[0], sleep)
    first, second = timer.transfer(0.02), timer.transfer(0.03)
    started.set()
    for pending in (second, first, first):
        pending.wait()
        assert now == [pytest.approx(100.05)]
    assert timer.busy_seconds == pytest.approx(0.05)
    assert Link(gb_per_s=2, latency_us=5).seconds(4_000_000_000) == pytest.approx(2.000005)
    assert Link().seconds(10**12) == 0


def test_received_rows_are_freed_while_their_expert_ids_are_in_use():
    ep = Loopback(8, 4)
    route = ep.prepare(torch.tensor([[0, 5], [3, 1]]))
    received = ep.dispatch(torch.randn(2, 6), route, torch.rand(2, 2)).wait()
    rows = StorageWeakRef(received.x_ND.untyped_storage())
    assert route.order.expert_offsets.tolist() == [0, 1, 4]
    del received
    assert rows.expired()


# ---- refusals ----


@pytest.mark.parametrize("refused,message", [
    (lambda: Link(gb_per_s=0), "positive bandwidth: got 0 GB/s"),
    (lambda: Link(latency_us=-1), "latency of at least 0: got -1 us"),
    (lambda: Link(sms=0), "at least 1 SM: got 0"),
])  # fmt: skip
def test_links_that_cannot_be_are_refused(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()
