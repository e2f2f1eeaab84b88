"""Loopback on a GPU: the kernels of Symmetric in one process give the results of Loopback on a CPU, bit for bit.

The kernels run in the interpreter. All memory that no kernel has written is NaN.
"""

import copy
import dataclasses
import types

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder as Builder

from moe_dualpipe.expert_parallel import Link, Loopback, Replay
from moe_dualpipe.expert_parallel.exchange import Exchange
from moe_dualpipe.expert_parallel.modeled.windows import LoopbackWindows
from moe_dualpipe.kernels.gpu import push as push_module
from moe_dualpipe.kernels.gpu import signals
from moe_dualpipe.models import MoE, StageOptions
from moe_dualpipe.overlap.engine import engine_for
from moe_dualpipe.overlap.host_syncs import host_syncs
from tests.machines.interpreter import prepare_rank
from tests.support.exchanges import check_round
from tests.support.expert_ids import KINDS, random_ids
from tests.support.models import with_choices
from tests.support.symmetric_ranks import forward_and_backward

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run on the GPU, not on these tensors")

EXPERTS, TOKENS, WIDTH, TOP_K = 8, 4, 16, 3
LINK = Link(sms=2)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    prepare_rank(monkeypatch)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)


def windows(ranks=4):
    ep = LoopbackWindows(
        EXPERTS, ranks, "auto", torch.zeros((), dtype=torch.int64), max_tokens=TOKENS, row_bytes=4 * WIDTH, top_k=TOP_K,
    )  # fmt: skip
    ep.paced.link = LINK
    ep.windows = dataclasses.replace(ep.windows, timeout=0.01)
    ep.windows.views(ep.own)[1].fill_(-1)  # NaN in all dtypes
    return ep


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks,dtype", [(1, torch.float32), (4, torch.bfloat16), (8, torch.float16)])
@pytest.mark.quick("4-dtype1-some without experts")
def test_results_are_those_of_loopback_on_a_cpu(ranks, dtype, kind):
    """Each slot is used several times."""
    ours, reference = windows(ranks), Loopback(EXPERTS, ranks)
    generator = torch.Generator().manual_seed(ranks)
    for tokens in (TOKENS, 3):
        ids = random_ids(generator, tokens, TOP_K, kind, EXPERTS)
        x, grads = (torch.randn(tokens, WIDTH, generator=generator).to(dtype) for _ in range(2))
        weights = torch.rand(ids.shape, generator=generator)
        route, expected = check_round(ours, reference, ids, x, weights, grads, EXPERTS // ranks)
        assert route.padded and route.num_rows == tokens * min(ranks, TOP_K) >= expected.num_rows
    assert int(ours.sent) == reference.bytes_sent
    ours.check()
    assert ours.windows.state[signals.EPOCHS :].tolist() == [4, 4]
    full_and_free = ours.own.view(ranks, -1)[:, :4]
    assert (full_and_free == 4).all()


# ---- Loopback with streams ----


@pytest.fixture
def streams(monkeypatch):
    """Let Loopback find streams on CPUs, but not the engine, which is built before."""
    engine_for(torch.device("cpu"))
    stream = types.SimpleNamespace(record_event=lambda: "an event", wait_event={"an event": None}.__getitem__)
    module = types.SimpleNamespace(current_stream=lambda _device: stream, is_current_stream_capturing=lambda: False)
    monkeypatch.setattr("moe_dualpipe.overlap.streams.streams_of", lambda _device: module)


class WithoutStreams(Loopback):
    prepare, dispatch, combine = Exchange.prepare, Exchange.dispatch, Exchange.combine


@pytest.mark.usefixtures("streams")
def test_windows_grow():
    ours, reference = Loopback(EXPERTS, 2, LINK), WithoutStreams(EXPERTS, 2)
    for seed, (tokens, width, most_tokens) in enumerate(((2, 8, 2), (0, 8, 2), (1, 16, 2), (3, 8, 3))):
        generator = torch.Generator().manual_seed(seed)
        ids = random_ids(generator, tokens, TOP_K - 1 + seed % 2, "even", EXPERTS)
        x, grads = (torch.randn(tokens, width, generator=generator) for _ in range(2))
        check_round(ours, reference, ids, x, torch.rand(ids.shape, generator=generator), grads, EXPERTS // 2)
        assert ours._windows is not None and ours._windows.max_tokens == most_tokens
    assert ours.bytes_sent == reference.bytes_sent
    twin = copy.deepcopy(ours)
    assert twin._windows is None and twin.bytes_sent == ours.bytes_sent


@pytest.mark.usefixtures("streams")
def test_the_host_does_not_wait():
    ep, x, weights = Loopback(EXPERTS, 4, LINK), torch.randn(2, WIDTH), torch.rand(2, TOP_K)
    ids = random_ids(torch.Generator().manual_seed(1), 2, TOP_K, "even", EXPERTS)
    ep.dispatch(x, ep.prepare(ids)).wait()  # makes the windows
    with host_syncs("cpu") as found:
        route = ep.prepare(ids)
        x_ND, weights_NK = ep.dispatch(x, route, weights).wait()
        ep.combine(x_ND, route, weights_NK).wait()
    assert not found
    assert not route.exact and route.num_choices == ids.numel()


@pytest.mark.usefixtures("streams")
def test_custom_experts_never_see_rows_past_the_received_ones():
    sizes = {"hidden_size": WIDTH, "num_experts": EXPERTS, "experts_per_token": TOP_K}
    config, results = with_choices(experts="tests.support.kernels:LinearExperts", **sizes), []
    for ep in (Loopback(EXPERTS, 4, LINK), WithoutStreams(EXPERTS, 4)):
        torch.manual_seed(0)
        layer, x = MoE(config, ep, 0, StageOptions(seed=1)), torch.randn(TOKENS, WIDTH).requires_grad_()
        results.append(forward_and_backward(layer, x))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("streams")
def test_transfers_have_the_speed_and_the_multiprocessors_of_the_link(monkeypatch):
    pushed = []
    monkeypatch.setattr(push_module, "push", lambda windows, *args: pushed.append((windows.num_sms, args[-1])))
    ids = torch.tensor([[0, 1], [2, 7]])
    ep = Loopback(EXPERTS, 4, Link(gb_per_s=2.0, latency_us=7.0, sms=5))
    route = ep.prepare(ids)
    ep.dispatch(torch.ones(2, 8), route, torch.ones(2, 2))
    ep.link = Link(gb_per_s=4.0, sms=3)
    ep.dispatch(torch.ones(2, 8), route)
    replay = Replay(EXPERTS, 4, {"combine(B)": 0.25}, sms=9)
    replay.dispatch(torch.ones(2, 8), replay.prepare(ids))
    assert [(sms, pace.row_bytes, pace.latency_ns, pace.ns_per_row) for sms, pace in pushed] == [
        (5, 128, 7000, 64), (3, 32, 0, 8), (9, 128, 0.25e9, 0)
    ]  # fmt: skip


# ---- the pace ----


@pytest.mark.parametrize("num_sms", [1, 3])
def test_each_row_waits_for_the_link(monkeypatch, num_sms):
    """The interpreter runs programs one after another, and the time advances when one looks."""
    now, stored, store = [0], {}, Builder.create_masked_store

    def look():
        now[0] += 10
        return tl.zeros((), tl.int64) + now[0]

    def recorded(builder, pointers, *rest):
        stored.setdefault(int(pointers.data.flat[0]), now[0])
        return store(builder, pointers, *rest)

    monkeypatch.setattr(push_module, "interpreter_enabled", lambda: False)
    monkeypatch.setattr(push_module, "_time", look)
    monkeypatch.setattr(Builder, "create_masked_store", recorded)
    ep = windows()
    rows = ep.windows.views(ep.own)[1][0]  # of slot 0
    addresses = [rows[rank, place].data_ptr() for rank in range(4) for place in range(2)]
    ep.paced.link = Link(gb_per_s=0.128, latency_us=5.0, sms=num_sms)
    ids = torch.tensor([[0, 2], [0, 7], [4, 7], [2, 4]])  # two rows for each rank
    ep.dispatch(torch.ones(4, WIDTH), ep.prepare(ids))
    for m, address in enumerate(addresses):
        others = max(m - 1, 0)  # the first two rows are for rank 0
        program_start = m % num_sms * (5000 + 6 * 1000)
        assert 0 <= stored[address] - (program_start + 5000 + others * 1000) < 300
    assert 0 <= now[0] - num_sms * 11_000 < 300
