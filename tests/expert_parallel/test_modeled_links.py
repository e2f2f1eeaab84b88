"""Backends with a modeled link: Loopback, Delayed, and the link itself."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from moe_dualpipe.expert_parallel import Delayed, Link, Local, Loopback, Replay
from moe_dualpipe.expert_parallel.modeled.link import LinkTimer
from moe_dualpipe.models import ModelConfig, MoE, StageOptions

CONFIG = ModelConfig(hidden_size=16, expert_size=12, num_experts=8, experts_per_token=3, init_std=0.3, head_dim=4)


# ---- loopback ----


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_loopback_equals_one_rank_with_copies_of_the_experts(ranks):
    """The single rank holds all experts. Those of rank 0 are repeated for every virtual rank."""
    local = MoE(CONFIG, Local(8), 0, StageOptions(seed=1)).double()
    looped = MoE(CONFIG, Loopback(8, ranks), 0, StageOptions(seed=1)).double()
    looped.router.load_state_dict(local.router.state_dict())
    if local.shared is not None:
        looped.shared.load_state_dict(local.shared.state_dict())  # type: ignore[union-attr]
    with torch.no_grad():
        for ours, theirs in zip(looped.experts.parameters(), local.experts.parameters(), strict=True):
            theirs.copy_(ours.repeat(ranks, 1, 1))
    x = torch.randn(11, 16, dtype=torch.float64)
    results = []
    for layer in (local, looped):
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.square().sum().backward()
        results.append([y, leaf.grad, layer.router.logits.weight.grad])
        experts = [p.grad for p in layer.experts.parameters()]
        if layer is local:
            experts = [g.unflatten(0, (ranks, -1)).sum(0) for g in experts]  # type: ignore[union-attr]
        results[-1] += experts
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_loopback_counts_a_row_once_per_destination_rank():
    link = Link(gb_per_s=1.0, latency_us=7.0)
    ep = Loopback(8, 4, link)
    ids = torch.tensor([[0, 1], [2, 3], [0, 7], [6, 7]])  # ranks: 0 | 1 | 0 and 3 | 3
    route = ep.prepare(ids)
    assert ep.timer.busy_seconds == pytest.approx(7e-6)  # the counts
    x_ND, weights_NK = ep.dispatch(torch.randn(4, 6), route, torch.rand(4, 2)).wait()
    assert x_ND.shape == (5, 6)
    assert weights_NK is not None
    message = (
        3 * 128
    )  # three sent rows: 6 floats, 2 weights and 2 ids in 32 + 16 + 16 bytes, padded to a multiple of 128
    assert ep.timer.busy_seconds == pytest.approx(2 * 7e-6 + message * 1e-9)
    ep.combine(x_ND, route).wait()
    assert ep.timer.busy_seconds == pytest.approx(3 * 7e-6 + (message + 3 * 24) * 1e-9)
    assert route.local_ids_NK is not None
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
    timer, start = LinkTimer(), time.perf_counter()
    first, second = timer.transfer(0.02), timer.transfer(0.03)
    second.wait()
    assert time.perf_counter() - start >= 0.05
    first.wait()
    first.wait()
    assert timer.busy_seconds == pytest.approx(0.05)


def test_durations_of_a_link():
    assert Link(gb_per_s=2, latency_us=5).seconds(4_000_000_000) == pytest.approx(2.000005)
    assert Link().seconds(10**12) == 0


def test_delayed_returns_the_results_of_its_backend_later():
    ids, x, weights = torch.tensor([[0, 3], [3, 1]]), torch.randn(2, 5), torch.rand(2, 2)
    plain, delayed = Local(8), Delayed(Local(8), Link(latency_us=20_000))
    assert delayed.local_experts == plain.local_experts
    route = delayed.prepare(ids)
    start = time.perf_counter()
    pending = delayed.dispatch(x, route, weights)
    received = pending.wait()
    assert time.perf_counter() - start >= 0.02
    assert pending.wait() is received
    assert torch.equal(received.x_ND, x)
    assert torch.equal(delayed.combine(x, route).wait().y_TD, x)


# ---- lifetimes and waits ----


def test_delayed_starts_without_waiting_for_its_backend():
    log = []

    class Backend(Local):
        def dispatch(self, x_TD, route, weights_TK=None):
            return RecordWait(log, super().dispatch(x_TD, route, weights_TK))

    delayed = Delayed(Backend(8), Link(gb_per_s=1.0))
    pending = delayed.dispatch(torch.ones(4, 250), delayed.prepare(torch.zeros(4, 1, dtype=torch.int64)))
    assert delayed.timer.busy_seconds == pytest.approx(4e-6)
    assert log == []
    pending.wait()
    assert log == ["waited"]


class RecordWait:
    """Records in `log` that a pending result was waited for."""

    def __init__(self, log, pending):
        self.log, self.pending = log, pending

    def wait(self):
        self.log.append("waited")
        return self.pending.wait()


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
    (lambda: Delayed(Local(8), Link())._delay(None, SimpleNamespace(is_cuda=True)), "cannot delay CUDA tensors"),
])  # fmt: skip
def test_links_that_cannot_be_are_refused(refused, message):
    with pytest.raises(ValueError, match=message):
        refused()
