"""Gains where one thing depends on another: ranks wait for each other, and what shares a device slows down."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.doctor.case import case_of
from moe_dualpipe.tools.profiler.doctor.causes import contention, order
from moe_dualpipe.tools.profiler.doctor.rank_graph import JointGraph
from moe_dualpipe.tools.profiler.doctor.ranks import meetings_of
from moe_dualpipe.tools.profiler.doctor.view import view_of
from moe_dualpipe.tools.profiler.doctor.what_if import Repairs
from moe_dualpipe.tools.profiler.files import analyze_devices
from moe_dualpipe.tools.profiler.ranks import compare_traces
from tests.support.diagnosed import verdicts_of
from tests.support.faults import FAULTS, run, write_traces
from tests.support.faults.jobs import moe_training
from tests.support.faults.program import Await, Collective, Item, Job, Kernel, Machine, Python, Record
from tests.support.traces import kernel, write

MACHINE = Machine(
    call_us=5, launch_us=5, latency_us=3, gap_us=1, slower_beside_transfers=0, slower_beside_computation=0
)  # fmt: skip
RANKS = (0, 1)


def transfer(key, us, stream="ep", ranks=RANKS):
    return Record(f"before {key}"), Collective(key, "all_reduce", "ep", ranks, us, 1000, stream, f"before {key}")


def job(program, machine=MACHINE, ranks=RANKS):
    """program: of a rank, the operations of each of eight layers."""
    return Job({r: tuple(op for i in range(8) for op in program(r, i)) for r in ranks}, machine, {"ep": (ranks,)})


def cases_of(made_up, folder, drift=0.0, launches=True):
    """The case of each rank, and what they have in common.

    drift: by how much the clock of rank 1 is too fast. launches: whether they are recorded.
    """
    examined, devices = [], []
    for path in write_traces(run(made_up), folder):
        whole = json.loads(path.read_text())
        for event in whole["traceEvents"] if path.name == "rank1.json" else ():
            event |= {key: event[key] * (1 + drift) for key in ("ts", "dur") if key in event}
        whole["host_name"] = path.name if drift else "node"  # ranks on one host share a clock
        if not launches:
            whole["traceEvents"] = [one for one in whole["traceEvents"] if one.get("cat") != "cuda_runtime"]
        path.write_text(json.dumps(whole))
        devices += analyze_devices(path, read_trace(path), pictures=False, examined=examined)
    cases = [one.case for one in examined]
    return cases, meetings_of(cases, compare_traces([device.transfers for device in devices]).meetings)


def with_slow(layer_us):
    """Ranks whose kernels take these times, with a collective in each layer. Rank 1 starts later."""

    def program(rank, i):
        start = Python(0 if i else 400 * rank)
        return (
            start,
            Kernel("a", layer_us[rank] + 7 * i),
            *transfer(f"t {i}", 50),
            Await(f"done t {i}"),
            Kernel("b", 20),
        )

    return program


@pytest.mark.parametrize(("drift", "launches"), [(0.0, True), (1e-3, True), (0.0, False)])
@pytest.mark.parametrize("layer_us", [(100, 300), (300, 100), (200, 200)])
def test_the_replay_of_several_ranks_gives_the_recorded_times(layer_us, drift, launches, tmp_path):
    cases, meetings = cases_of(job(with_slow(layer_us)), tmp_path, drift, launches)
    joint = JointGraph(cases, meetings)
    assert joint.shift == pytest.approx([0, 400], abs=3)
    times = joint.replay([case.graph for case in cases])
    for case, found in zip(cases, times, strict=True):
        assert found.window_us == pytest.approx(case.window_us)
        assert np.ptp(found.start - case.graph.start) < 0.01  # one clock for both ranks
        assert found.end - found.start == pytest.approx(case.graph.duration, abs=0.01)


def test_a_fast_rank_gains_nothing_without_its_own_waits_if_another_rank_is_slow(tmp_path):
    def program(rank, i):
        return (*with_slow((100, 500))(rank, i), *([] if rank else [Item()]))

    found = {(rank, verdict.kind) for rank, verdict in verdicts_of(job(program), tmp_path)}
    assert (0, "imbalance") in found and (0, "host-sync") not in found


def test_a_slow_rank_gains_without_its_waits(tmp_path):
    """Rank 1 reads a number in each layer, or copies it without a wait."""
    copy = Kernel("Memcpy DtoH (Device -> Pageable)", 2, category="gpu_memcpy")

    def program(read):
        return lambda rank, i: (*with_slow((100, 100))(rank, i), Kernel("c", 100), *([read] if rank else []))

    before, after = (run(job(program(read))).ranks[1].window_us for read in (Item(), copy))
    found = {(rank, verdict.kind): verdict for rank, verdict in verdicts_of(job(program(Item())), tmp_path)}
    assert found[1, "host-sync"].gain_us == pytest.approx(before - after, rel=0.05)


def test_ranks_whose_collectives_do_not_fit_together_are_replayed_alone(tmp_path):
    def program(_, i):
        keys = [f"s {i}", f"t {i}"]
        return (Kernel("a", 100), *(op for key in keys for op in transfer(key, 50)))

    cases, [met] = cases_of(job(program), tmp_path)
    events = met.events_Mn.copy()
    events[1] = events[1][::-1]  # each rank would wait for the other
    repairs = Repairs(cases, [met._replace(events_Mn=events)], [[], []], [{}, {}])
    assert repairs.joint is None
    assert repairs.times(0, []).window_us == pytest.approx(cases[0].window_us)


@pytest.mark.parametrize("one", ["slow link", "late launch"])
def test_the_kernels_beside_transfers_change_with_them(one, tmp_path):
    """Not only the transfers of a slow link take less time: the kernels beside them do, too."""
    base = FAULTS["starved computation"].apply(moe_training(), 2)
    both = FAULTS[one].apply(base, 2)
    [gain, *_] = [verdict.gain_us for _, verdict in verdicts_of(both, tmp_path) if verdict.kind == FAULTS[one].kind]
    assert gain == pytest.approx(run(both).window_us - run(base).window_us, rel=0.1)


def test_a_shared_queue_keeps_its_order_without_the_waits_of_the_host(tmp_path):
    base = moe_training(layers=4).on(queues=1)
    both = FAULTS["host sync"].apply(base, 2)
    gains = {verdict.kind: verdict.gain_us for _, verdict in verdicts_of(both, tmp_path)}
    true = run(both).window_us - run(base).window_us
    assert gains.get("host-sync", 0.0) == pytest.approx(true, abs=0.01 * run(both).window_us)
    assert gains["few-queues"] > 5 * true


def test_three_streams_of_which_two_pairs_share_a_queue_share_one(tmp_path):
    def program(_, i):
        return (
            Kernel("a", 300), *transfer(f"s {i}", 200, ranks=(0,)), Kernel("b", 300),
            *transfer(f"t {i}", 200, "dp", ranks=(0,)),
        )  # fmt: skip

    [case], _ = cases_of(job(program, replace(MACHINE, queues=1), (0,)), tmp_path)
    [stays] = [found.stays for found in order.find(case) if found.stays is not None]
    assert len(set(case.view.stream)) == 3
    nodes = case.nodes.event[np.argsort(case.view.launch, kind="stable")]
    queue = stays(case.graph).queue
    assert queue is not None and (queue[nodes[1:]] == nodes[:-1]).all()


def test_a_collective_is_slowed_down_by_computation_on_any_rank(tmp_path):
    """Rank 0 computes nothing beside its transfers, rank 1 does in every other layer."""

    def program(rank, i):
        beside = [Kernel("b", 400)] if rank and i % 2 else []
        wait = [Await(f"done t {i}")]
        return (Kernel("a", 100), *transfer(f"t {i}", 300), *beside, *wait, Kernel("c", 50 if beside else 100))

    slower = replace(MACHINE, slower_beside_computation=0.5)
    found = {(rank, verdict.kind) for rank, verdict in verdicts_of(job(program, slower), tmp_path)}
    assert {(0, "starved-transfer"), (1, "starved-transfer")} <= found


def test_only_ranks_of_one_group_meet(tmp_path):
    """Groups of one name, a rank alone, and sends in both directions."""
    _, meetings = cases_of(moe_training(ranks=4, expert_ranks=2, layers=2), tmp_path / "moe")
    assert sorted(met.ranks_M.tolist() for met in meetings) == [[0, 1], [0, 2], [1, 3], [2, 3]]

    def program(rank, i):
        for source in RANKS:
            kind, key = "recv" if rank - source else "send", f"{source} {i}"
            yield Kernel("a", 100)
            yield Record(key)
            yield Collective(key, kind, "ep", RANKS, 50, 1, "ep", key, peers=(source, 1 - source))

    assert cases_of(job(program), tmp_path / "pipeline")[1] == []


@pytest.mark.parametrize(("moving_us", "beside"), [(100, 50), (60, 10), (40, 0)])
def test_waits_for_other_ranks_are_not_beside_computation(moving_us, beside, tmp_path):
    """A kernel from 0 to 100 us, and a transfer from 50 to 150 us, which waits at first."""
    events = [kernel("gemm", 0, 100), kernel("ncclDevKernel", 50, 100, stream=8)]
    case = case_of(view_of(read_trace(write(tmp_path / "t.json", events)), "0", NAMES.kind_of))
    found = contention.beside_us(case, True, case.graph.recorded, np.array([100.0, moving_us]))
    assert found.tolist() == [0, beside]


@pytest.mark.parametrize(("alone", "beside", "ratio"), [
    ((99, 101, 100, 100), (149, 151, 150, 150), 1.5), ((90, 130, 100, 100), (110, 140, 105, 145), None),
])  # fmt: skip
def test_a_slowdown_within_the_spread_of_the_durations_is_uncertain(alone, beside, ratio, tmp_path):
    """Kernels that run alone, and kernels beside transfers all the time."""
    events = [kernel("gemm", 200 * i, us) for i, us in enumerate((*alone, *beside))]
    case = case_of(view_of(read_trace(write(tmp_path / "t.json", events)), "0", NAMES.kind_of))
    found = contention.slowdown_of(case, False, np.array([0.0] * 4 + [*beside]))
    assert (found and found.ratio) == (ratio and pytest.approx(ratio, rel=0.01))
