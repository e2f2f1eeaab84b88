"""Gains where one thing depends on another: ranks wait for each other, and what shares a device slows down."""

import json
from dataclasses import replace

import numpy as np
import pytest

from moe_dualpipe.tools.profiler import read_trace
from moe_dualpipe.tools.profiler.doctor.causes.transfers import of_slowdown, slowdown_of
from moe_dualpipe.tools.profiler.doctor.ranks import JointGraph, meetings_of
from moe_dualpipe.tools.profiler.files import analyze_devices
from moe_dualpipe.tools.profiler.ranks import compare_traces
from tests.support.diagnosed import case_of, verdicts_of
from tests.support.faults import FAULTS, run, write_traces
from tests.support.faults.jobs import moe_training
from tests.support.faults.program import Await, Collective, Item, Job, Kernel, Machine, Python, Record
from tests.support.traces import kernel, write

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
    found, devices = [], []
    for path in write_traces(run(made_up), folder, drift=drift):
        whole = json.loads(path.read_text())
        kept = [one for one in whole["traceEvents"] if launches or one.get("cat") != "cuda_runtime"]
        path.write_text(json.dumps(whole | {"traceEvents": kept}))
        devices += analyze_devices(path, read_trace(path), pictures=False, examined=found)
    cases, comparison = [one.case for one in found], compare_traces([device.transfers for device in devices])
    return cases, meetings_of(cases, comparison.meetings), [shift or 0.0 for shift in comparison.shifts_us]


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
    times = JointGraph(cases, meetings, shifts).replay([case.graph for case in cases])
    for case, found in zip(cases, times, strict=True):
        assert found.window_us == pytest.approx(case.window_us)
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
    assert gain == pytest.approx(run(both).window_us - run(base).window_us, rel=0.1)


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
    assert found and ("or copy engines" in of_slowdown(case, found).verdict.remedy) == advised
