"""CopyEngine gives the results of AllToAll bit for bit, and can be replayed. Copies and kernels are safe in all orders.

Processes that share memory take the part of GPUs. The check of orders uses what the real kernels and copies did
(tests/machines/one_sided/record.py); if any of their fences is removed or weakened, it finds what goes wrong.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from moe_dualpipe.expert_parallel.copy_engine import CopyEngine
from moe_dualpipe.expert_parallel.copy_engine.copies import Copies
from moe_dualpipe.expert_parallel.symmetric.one_sided import OneSided
from moe_dualpipe.kernels import routing
from moe_dualpipe.overlap.host_syncs import host_syncs
from tests.machines.emulated_graph import EmulatedGraph
from tests.machines.interpreter import prepare_rank
from tests.machines.one_sided.record import CALLS, Streams, record, virtual_ranks
from tests.machines.one_sided.search import explore
from tests.machines.one_sided.weaken import check_fences
from tests.support.expert_ids import KINDS, random_ids
from tests.support.ranks import run_ranks
from tests.support.symmetric_ranks import layers_agree, needs_interpreter, rounds

pytestmark = needs_interpreter


def copying(*arguments, flags="copies", **options):
    return OneSided(*arguments, transport=Copies(flags), **options)


@pytest.mark.parametrize("ranks,flags,seeds", [
    (2, "copies", range(1)), (2, "kernel", range(1, 2)), *((ranks, "copies", range(100, 115)) for ranks in (1, 2, 4)),
])  # fmt: skip
@pytest.mark.quick("2-copies-seeds0", "2-kernel-seeds1")
def test_results_are_those_of_all_to_all_bit_for_bit(ranks, flags, seeds):
    run_ranks(ranks, rounds, ranks, seeds, partial(CopyEngine, flags=flags), timeout=600)


def test_a_layer_and_its_gradients_equal_those_of_all_to_all():
    run_ranks(2, layers_agree, {}, CopyEngine)


def test_more_ranks_than_padded_messages_are_good_for_are_refused():
    with pytest.raises(ValueError, match=r"^CopyEngine is for at most 16 ranks: got 17; use Symmetric$"):
        CopyEngine(34, SimpleNamespace(size=lambda: 17))  # type: ignore[arg-type]


# ---- graphs: ranks of one process ----

RANKS, EXPERTS, TOKENS, TOP_K, WIDTH = 2, 6, 3, 2, 4


@pytest.fixture
def _streams(monkeypatch):
    """Let the backend find streams on a CPU, and route as on a GPU."""
    prepare_rank(monkeypatch)
    module = Streams(RANKS)
    monkeypatch.setattr("moe_dualpipe.overlap.streams.streams_of", lambda _device: module)
    monkeypatch.setattr("moe_dualpipe.expert_parallel.sends.count_choices", lambda *_: None)
    monkeypatch.setattr(routing, "_stable_sort", lambda keys, _: keys.sort(stable=True))


def build():
    sizes = {"max_tokens": TOKENS, "row_bytes": 4 * WIDTH, "top_k": TOP_K, "slots": 4}
    return virtual_ranks(copying, RANKS, EXPERTS, **sizes)


def fill(inputs, seed):
    """Other tokens and routes for all lanes and ranks. Some ranks send nothing, or all of their tokens to one rank."""
    generator = torch.Generator().manual_seed(seed)
    for lane, ranks in enumerate(inputs):
        for rank, (ids, x, weights) in enumerate(ranks):
            kind = KINDS[(rank + seed + lane) % 4]
            chosen = random_ids(generator, TOKENS, TOP_K, kind, EXPERTS)
            ids.copy_(torch.full_like(ids, -1) if kind == "half of the experts" else chosen)
            x.copy_(torch.randn(x.shape, generator=generator))
            weights.copy_(torch.rand(weights.shape, generator=generator))


def step(eps, inputs):
    """Forward of a layer on all ranks, with two micro-batches in flight. Rank r multiplies by r + 1."""
    routes = [[ep.prepare(ids) for ep, (ids, *_) in zip(eps, lane, strict=True)] for lane in inputs]
    pending = [
        [ep.dispatch(x, route, weights) for ep, route, (_, x, weights) in zip(eps, of_lane, lane, strict=True)]
        for of_lane, lane in zip(routes, inputs, strict=True)
    ]
    results = []
    for of_lane, transfers in zip(routes, pending, strict=True):
        received = [transfer.wait() for transfer in transfers]
        results += [torch.where(r.local_ids_NK >= 0, w, 0) for r, (_, w) in zip(of_lane, received, strict=True)]
        back = [ep.combine(x * (ep.rank + 1), r) for ep, (x, _), r in zip(eps, received, of_lane, strict=True)]
        results += [transfer.wait().y_TD for transfer in back]
    return results


@pytest.mark.usefixtures("_streams")
def test_replays_of_a_graph_have_the_bits_of_eager_calls_and_the_host_does_not_wait():
    """Each replay has other routes. The sizes of copies do not depend on them, and the device counts the messages."""
    ours, eager = build(), build()
    inputs = [
        [(torch.zeros(TOKENS, TOP_K).long(), torch.zeros(TOKENS, WIDTH), torch.zeros(TOKENS, TOP_K)) for _ in ours]
        for _ in range(2)
    ]
    fill(inputs, 0)
    written = [
        (t, t.clone()) for ep in ours for t in (ep.own, ep.transport.staging)
    ]  # by addresses: a graph cannot restore it
    graph = EmulatedGraph()
    with host_syncs("cpu") as found, graph.kernels(), graph:
        results = step(ours, inputs)
    assert not found
    graph.restore()
    for t, before in written:
        t.copy_(before)
    for seed in range(2):
        fill(inputs, seed)
        graph.replay()
        for mine, theirs in zip(results, step(eager, inputs), strict=True):
            assert torch.equal(mine, theirs)
    for mine, theirs in zip(step(ours, inputs), results, strict=True):  # after replays
        assert torch.equal(mine, theirs)
    for ep in ours:
        ep.check()


# ---- orders ----

OVERWRITTEN = (
    r"(copy of a message of message \d, stores to memory|push_kernel of message \d, stores to staging)\S+ of rank"
)
UNSENT = r"in copy of a message of message \d, (loads staging\S+ .* may be storing|finds nothing in staging)"
READ_EARLY = r"in receive_\w+ of message \d, (loads memory\S+ .* may be storing|finds)"
OWN_FENCES = {
    "push_kernel, wait_for_all: value = _acquire(flag)": OVERWRITTEN,
    "receive_rows_kernel, wait_for_all: value = _acquire(flag)": READ_EARLY,
    "receive_sums_kernel, wait_for_all: value = _acquire(flag)": READ_EARLY,
    "release: tl.debug_barrier()": r"stores to state\[5\] .* while another of its threads may be loading it",
    "an event": UNSENT, "copies wait, an event": UNSENT,
}  # fmt: skip
RELEASE = 'release: tl.atomic_xchg(flags_R, epoch, mask=r < R, sem="release", scope="sys")'


# A wait of one program only spares multiprocessors: the kernels that need the rows wait too. With copied flags, kernels
# wait for the copies of their rank only because a graph needs it: the ranks that free a slot have waited for them.
@pytest.mark.parametrize("backend,without,fences", [
    (copying, ("wait_for_ranks_kernel", "kernels wait"), {
        "a flag is copied": READ_EARLY, RELEASE: OVERWRITTEN,
        "a flag is read before it is written": r"stores to staging\[\d\] of rank \d while .* may be loading",
    }),
    (partial(copying, flags="kernel"), ("wait_for_ranks_kernel",),
     {RELEASE: READ_EARLY, "kernels wait, an event": r"stores to state\[5\] .* may be loading"}),
], ids=["copies", "kernel"])  # fmt: skip
def test_all_orders_are_safe_and_none_of_the_fences_is_superfluous(backend, without, fences):
    recording = record(CALLS, backend, on_streams=True)
    explore(recording)
    ranks = [[one for one in launches if one.kernel not in without] for launches in recording.ranks]
    check_fences(recording._replace(ranks=ranks), OWN_FENCES | fences)
