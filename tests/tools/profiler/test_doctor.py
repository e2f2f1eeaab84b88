"""The replay: what is unchanged stays, what becomes shorter never makes anything later; on one rank and on several."""

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.doctor.calls import POLL
from moe_dualpipe.tools.profiler.doctor.device import Device
from moe_dualpipe.tools.profiler.doctor.joint import JointGraph, shared_collectives
from moe_dualpipe.tools.profiler.doctor.replay import (
    ASSUMED,
    DATA,
    LAUNCH,
    SYNC,
    edges,
    ends,
    graph_of_nodes,
    replay,
    shorter,
    without,
)
from moe_dualpipe.tools.profiler.doctor.slowdown import cause_of, slowdown_of
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.host import as_device
from moe_dualpipe.tools.profiler.ranks import compare_traces
from tests.support.diagnosed import case_of, gain_of, verdicts_of
from tests.support.faults import FAULTS, run, write_traces
from tests.support.faults.jobs import moe_training
from tests.support.faults.program import Await, Collective, Item, Job, Kernel, Machine, Python, Record, poll
from tests.support.traces import annotation, kernel, launch, write


@st.composite
def graphs(draw):
    """Recorded nodes that depend on earlier ones; many lags contradict the recording."""
    size = draw(st.integers(1, 12))
    us = st.lists(st.integers(0, 40).map(float), min_size=size, max_size=size)
    duration, lag, launch_lag, start = (np.array(draw(us)) for _ in range(4))
    before, launch = (np.array([draw(st.integers(-1, i - 1)) for i in range(size)], np.int64) for _ in range(2))
    target = np.array([i for i in range(1, size) if draw(st.booleans())], np.int64)
    source = np.array([draw(st.integers(0, i - 1)) for i in target.tolist()], np.int64)
    is_device = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    waits = edges(ends(source), target, lag[target], ASSUMED)
    return graph_of_nodes(is_device, np.sort(start), duration, before, lag, launch, launch_lag, waits)


@settings(deadline=None)
@given(graphs(), st.data())
def test_laws_of_the_replay(graph, data):
    """It gives the recorded times. Shorter nodes and fewer dependencies make nothing later. The recorded starts only
    give a first guess at the order."""
    size, before = len(graph.start), replay(graph)
    np.testing.assert_allclose(before.start, graph.start, atol=1e-9)
    np.testing.assert_allclose(before.end, graph.start + graph.duration, atol=1e-9)
    assert (graph.delay >= 0).all()
    us = np.array(data.draw(st.lists(st.floats(0, 50), min_size=size, max_size=size)))
    rows = np.flatnonzero(np.arange(len(graph.edges.lag)) >= 2 * size)[:: data.draw(st.integers(1, 3))]
    for changed in (shorter(graph, np.arange(size), us), without(graph, rows)):
        after = replay(changed)
        assert (after.start <= before.start + 1e-9).all() and (after.end <= before.end + 1e-9).all()
    guess = np.array(data.draw(st.permutations(range(size))), float)
    np.testing.assert_allclose(replay(replace(graph, start=guess)).end, before.end, atol=1e-9)


def test_a_node_starts_after_the_start_of_its_launch_and_the_end_of_the_node_before():
    start, us, none = np.array([0.0, 10.0, 30.0]), np.array([10.0, 20.0, 5.0]), np.full(3, -1, np.int64)
    before, launch, waits = np.array([-1, 0, 1]), np.array([-1, -1, 0]), edges(none[:0], none[:0], 0.0, DATA)
    graph = graph_of_nodes(np.ones(3, bool), start, us, before, np.zeros(3), launch, 0.0, waits)
    assert replay(without(graph, np.array([2]))).start.tolist() == [0, 10, 0]
    assert graph.edges.kind.tolist()[3:] == [LAUNCH] * 3


# ---- what waits for what ----


@pytest.mark.parametrize(("waits", "of_transfer", "of_kernel"), [(0, -1, -1), (1, 1, 0), (2, 1, 1), (3, 1, 2)])
def test_a_transfer_uses_up_one_of_the_queued_waits(tmp_path, waits, of_transfer, of_kernel):
    """The kernel is launched after the transfer, and a second kernel after it. Another thread queues a wait."""
    events = [launch(10 + i, 10 + i, name="cudaStreamWaitEvent") for i in range(waits)]
    events += [launch(9, 15, thread=2, name="cudaStreamWaitEvent")] * (waits > 0)
    for i, name in enumerate(("ncclDevKernel", "gemm", "gemm")):
        events += [launch(i, 20 + 5 * i), kernel(name, 100 + 50 * i, 40, stream=8 if i else 9, correlation=i)]
    case = case_of(write(tmp_path / "t.json", events))
    assert case.num_waits.tolist() == [of_transfer, of_kernel, min(of_kernel, 0) if waits == 0 else 0]
    assert case.may_wait.tolist() == [of_transfer != 0, of_kernel != 0, waits == 0]


@pytest.mark.parametrize(("after_us", "kind"), [(4, DATA), (20, ASSUMED)])
def test_a_transfer_that_starts_soon_after_its_input_waited_for_it(after_us, kind, tmp_path):
    """The second kernel needs the transfer that ended last, not that which was launched last."""
    events = [launch(i, 2 * i) for i in (1, 2, 3, 5)]
    events += [launch(10 + i, 2 * i - 1, name="cudaStreamWaitEvent") for i in (2, 3, 5)]
    events += [kernel("gemm", 10, 100, correlation=1), kernel("gemm", 900, 50, correlation=5)]
    events += [kernel("ncclDevKernel", 110 + after_us, us, stream=i, correlation=i) for i, us in ((2, 290), (3, 90))]
    case = case_of(write(tmp_path / "t.json", events))
    found = case.graph.edges.keep(np.isin(case.graph.edges.kind, (DATA, ASSUMED)))
    rows = zip(found.source_node.tolist(), found.target.tolist(), found.kind.tolist(), strict=True)
    assert {*rows} == {(0, 1, kind), (0, 2, kind), (2, 3, ASSUMED)}


def polling(compute_us, wait, folder):
    """Layers of a long kernel, a transfer of its output, and a second transfer whose launch needs the first one."""
    ops = []
    for layer in range(6):
        sent = [Collective(f"{key} {layer}", "all_to_allv", "ep", (0,), us, 1, "ep", f"out {layer}")
                for key, us in (("sizes", 50), ("rows", 400))]  # fmt: skip
        ops += [Kernel(f"attention_{layer}", compute_us), Record(f"out {layer}"), sent[0], wait, sent[1]]
        ops.append(Await(f"done rows {layer}"))
    [path] = write_traces(run(Job({0: tuple(ops)}, Machine(5, 5, 3, 9, 1, 1, 1))), folder)
    return case_of(path)


def test_what_follows_a_poll_moves_with_what_it_waits_for(tmp_path):
    case, faster = (polling(us, poll("ep"), tmp_path / str(us)) for us in (3000, 1800))
    true, us = case.window_us - faster.window_us, 0.4 * case.duration * ~case.is_comm
    assert true > 1000 and gain_of(case, partial(shorter, nodes=np.arange(len(case.events)), us=us)) == pytest.approx(
        true, rel=0.01
    )


@pytest.mark.parametrize(("wait", "us", "number"), [
    (poll("ep"), 3000, 6), (Python(20), 3000, 0), (Python(4000), 3000, 0), (poll("ep"), 200, 0),
], ids=str)  # fmt: skip
def test_polls(tmp_path, wait, us, number):
    """None: a host that is ahead, one that works long after the transfer, and a wait as short as ordinary work."""
    assert sum(call.name == POLL for call in polling(us, wait, tmp_path).calls) == number


@pytest.mark.parametrize(("us", "ends_at", "waits"), [(150, 140, True), (50, 40, False), (150, 160, False)])
def test_a_long_call_that_outlasts_its_own_copy_waits_for_it(tmp_path, us, ends_at, waits):
    events = [launch(1, 0, name="cudaMemcpyAsync", duration=us), kernel("Memcpy DtoH", 5, ends_at - 5, correlation=1)]
    case = case_of(write(tmp_path / "t.json", events))
    assert [call.sync for call in case.calls] == [waits] == [SYNC in case.graph.edges.kind]


def test_launches_wait_while_the_queue_is_full(tmp_path):
    """3,000 kernels, launched every 1 us until 1,000 are queued. On a faster device, they are launched earlier."""
    events, now = [], 0.0
    for i in range(3000):
        blocked = max(200.0 * (i - 999) - now, 1.0)
        events += [launch(i, now, duration=blocked), kernel("gemm", 10 + 200 * i, 199, correlation=i)]
        now += blocked
    case = case_of(write(tmp_path / "t.json", events))
    assert gain_of(case, partial(shorter, nodes=np.arange(len(case.events)), us=case.duration / 2)) == pytest.approx(
        3000 * 199 / 2, rel=0.05
    )


# ---- Where one thing depends on another: ranks wait for each other, and what shares a device slows down ----


MACHINE = Machine(
    call_us=5, launch_us=5, latency_us=3, gap_us=1, slower_beside_transfers=0, slower_beside_computation=0
)  # fmt: skip
RANKS = (0, 1)


def transfer(key, us, kind="all_reduce", peers=None):
    mark = f"before {key}"
    return Record(mark), Collective(key, kind, "ep", RANKS, us, 1000, "ep", mark, peers=peers)


def job(program, machine=MACHINE):
    """program: of a rank, the operations of each of eight layers."""
    return Job({r: tuple(op for i in range(8) for op in program(r, i)) for r in RANKS}, machine)


def examined(made_up, folder, drift=0.0, launches=True):
    """The case of each rank, what they have in common, and their clocks.

    drift: by how much the clock of rank 1 is too fast. launches: whether they are recorded.
    """
    paths = write_traces(run(made_up), folder, drift=drift)
    for path in paths:
        whole = json.loads(path.read_text())
        kept = [one for one in whole["traceEvents"] if launches or one.get("cat") != "cuda_runtime"]
        path.write_text(json.dumps(whole | {"traceEvents": kept}))
    traces = [as_device(read_trace(path), NAMES) for path in paths]
    cases, comparison = [Device(trace) for trace in traces], compare_traces(traces)
    return cases, shared_collectives(cases, comparison.meetings), [shift or 0.0 for shift in comparison.shifts_us]


def with_slow(layer_us):
    """Ranks whose kernels take these times, with a collective in each layer. Rank 1 starts later."""

    def program(rank, i):
        computing = Python(0 if i else 400 * rank), Kernel("a", layer_us[rank] + 7 * i)
        return (*computing, *transfer(f"t {i}", 50), Await(f"done t {i}"), Kernel("b", 20))

    return program


@pytest.mark.parametrize(("drift", "launches"), [(0.0, True), (1e-3, True), (0.0, False)])
@pytest.mark.parametrize("layer_us", [(100, 300), (200, 200)])
def test_the_replay_of_several_ranks_gives_the_recorded_times(layer_us, drift, launches, tmp_path):
    cases, meetings, shifts = examined(job(with_slow(layer_us)), tmp_path, drift, launches)
    assert shifts == pytest.approx([0, 400], abs=3)
    graphs = [case.graph for case in cases]
    times, apart = (JointGraph(cases, *how).replay(graphs) for how in ((meetings, shifts), (meetings[:0], [0, 0])))
    for case, found, alone in zip(cases, times, apart, strict=True):
        assert found.window_us == pytest.approx(case.window_us)
        assert np.array_equal(alone.end, replay(case.graph).end)  # a graph without collectives is that of each rank
        assert alone.start[: len(case.events)] == pytest.approx(case.start, abs=1e-6)
        assert np.ptp(found.start - case.graph.start) < 0.01  # one clock for both ranks
        assert found.end - found.start == pytest.approx(case.graph.duration, abs=0.01)


def test_a_fast_rank_gains_nothing_without_its_own_waits_if_another_rank_is_slow(tmp_path):
    def program(rank, i):
        return (*with_slow((100, 500))(rank, i), *([] if rank else [Item()]))

    found = {(rank, verdict.kind) for rank, verdict in verdicts_of(job(program), tmp_path)}
    assert (0, "imbalance") in found and (0, "host-sync") not in found


def test_the_kernels_beside_transfers_change_with_them(tmp_path):
    """Not only the transfers of a slow link take less time: the kernels beside them do, too."""
    base = FAULTS["starved computation"].apply(moe_training(), 2)
    both = FAULTS["slow link"].apply(base, 2)
    [gain, *_] = [verdict.gain_us for _, verdict in verdicts_of(both, tmp_path) if verdict.kind == "slow-transfer"]
    slow, usual = (max(rank.window_us for rank in run(made_up).values()) for made_up in (both, base))
    assert gain == pytest.approx(slow - usual, rel=0.1)


def test_a_collective_is_slowed_down_by_computation_on_any_rank(tmp_path):
    """Rank 0 computes nothing beside its transfers, rank 1 does in every other layer."""

    def program(rank, i):
        beside = [Kernel("b", 400)] if rank and i % 2 else []
        sent = *transfer(f"t {i}", 300), *beside, Await(f"done t {i}")
        return (Kernel("a", 100), *sent, Kernel("c", 50 if beside else 100))

    found = verdicts_of(job(program, replace(MACHINE, slower_beside_computation=0.5)), tmp_path)
    assert {rank for rank, verdict in found if verdict.kind == "starved-transfer"} == {0, 1}


@pytest.mark.parametrize(("alone", "beside", "ratio"), [
    ((99, 101, 100, 100), (149, 151, 150, 150), 1.5), ((90, 130, 100, 100), (110, 140, 105, 145), None),
])  # fmt: skip
def test_a_slowdown_within_the_spread_of_the_durations_is_uncertain(alone, beside, ratio, tmp_path):
    """Kernels that run alone, and kernels beside transfers all the time."""
    events = [kernel("gemm", 200 * i, us) for i, us in enumerate((*alone, *beside))]
    found = slowdown_of(case_of(write(tmp_path / "t.json", events)), False, np.array([0.0] * 4 + [*beside]))
    assert (found and 1 / (1 - found.k)) == (ratio and pytest.approx(ratio, rel=0.01))


@pytest.mark.parametrize(("name", "category", "advised"), [
    ("ncclDevKernel_AllReduce", "kernel", True), ("Memcpy PtoP (Device -> Device)", "gpu_memcpy", False),
])  # fmt: skip
def test_copy_engines_are_advised_only_if_transfers_do_not_use_them(name, category, advised, tmp_path):
    """A backend that copies has kernels, too. How long each event ran beside transfers is given."""
    kernels = [kernel("gemm", 200 * i, 150 if i > 3 else 100) for i in range(8)]
    events = [*kernels, kernel(name, 1600, 80, stream=9, cat=category), kernel("push_kernel", 1700, 20, stream=9)]
    case = case_of(write(tmp_path / "t.json", events))
    found = slowdown_of(case, False, np.array([0.0] * 4 + [150.0] * 4 + [0.0] * 2))
    assert found and ("or copy engines" in cause_of(case, found).verdict.remedy) == advised


def test_what_all_transfers_share_is_found_once(tmp_path, monkeypatch):
    """A trace can have 50,000 transfers: looking at all events for each of them would take hours."""
    found, spans = [], Device.spans
    for number in (20, 40):
        events = [annotation(f"attn{i % 7}(F)", 4 * i, 4) for i in range(number)]
        for i in range(2 * number):
            name, stream = (("gemm", 7), ("ncclDevKernel_AllToAll", 8))[i % 2]
            events += [launch(i, 2 * i), kernel(name, 200 * i + 9, 199, stream, i)]
        calls = []
        with monkeypatch.context() as patch:
            patch.setattr(
                Device, "spans", lambda device, *kinds, calls=calls: calls.append(kinds) or spans(device, *kinds)
            )
            files = analyze_files([write(tmp_path / f"{number}.json", events)])
        assert "nothing-to-overlap" in {verdict.kind for verdict in files.devices[0].analysis.verdicts}
        found.append(len(calls))
    assert found[0] == found[1]
