"""Waits of the host without a call, as in DeepEP's dispatch: found, and moved with what they wait for."""

import pytest

from moe_dualpipe.tools.profiler import read_trace
from moe_dualpipe.tools.profiler.communication import NAMES
from moe_dualpipe.tools.profiler.doctor.case import Case, case_of, shorter
from moe_dualpipe.tools.profiler.doctor.causes.exposed import find_nothing_else
from moe_dualpipe.tools.profiler.doctor.view import COMPUTE, POLL, view_of
from tests.support.diagnosed import gain_of
from tests.support.faults import run, write_traces
from tests.support.faults.program import Await, Collective, Job, Kernel, Machine, Poll, Python, Record
from tests.support.traces import kernel, launch, write

MACHINE = Machine(
    call_us=5, launch_us=5, latency_us=3, gap_us=1, slower_beside_transfers=1, slower_beside_computation=1
)


def job(compute_us, wait):
    """Layers of a long kernel, a transfer of its output, and a second transfer whose launch needs the first one."""
    ops = []
    for layer in range(6):
        ops += [Kernel(f"attention_{layer}", compute_us), Record(f"out {layer}")]
        ops.append(Collective(f"notify {layer}", "all_to_allv", "ep", (0,), 50, 1, "ep", f"out {layer}"))
        ops += [wait, Collective(f"rows {layer}", "all_to_allv", "ep", (0,), 400, 1, "ep", f"out {layer}")]
        ops.append(Await(f"done rows {layer}"))
    return Job({0: tuple(ops)}, MACHINE, {"ep": ((0,),)})


def recorded(compute_us, wait, folder) -> Case:
    [path] = write_traces(run(job(compute_us, wait)), folder)
    trace = read_trace(path)
    return case_of(view_of(trace, trace.device_events[0].device, NAMES.kind_of))


def polls(case):
    return [call for call in case.view.calls if call.name == POLL]


def gain_at(case, factor):
    us = (1 - factor) * case.view.duration * (case.view.kind == COMPUTE)
    return gain_of(case, shorter(case.nodes.event, us))


@pytest.mark.parametrize("factor", [0.9, 0.6])
def test_what_follows_a_poll_moves_with_what_it_waits_for(tmp_path, factor):
    case = recorded(3000, Poll("ep"), tmp_path / "before")
    assert len(polls(case)) == 6
    faster = recorded(3000 * factor, Poll("ep"), tmp_path / "after")
    true = case.window_us - faster.window_us
    assert true > 1000 and gain_at(case, factor) == pytest.approx(true, rel=0.01)


def test_the_unchanged_replay_gives_the_recorded_window(tmp_path):
    case = recorded(3000, Poll("ep"), tmp_path)
    assert gain_of(case) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(("wait", "us"), [(Python(20), 3000), (Python(4000), 3000), (Poll("ep"), 200)], ids=str)
def test_what_is_no_poll(tmp_path, wait, us):
    """A host that is ahead, one that works long after the transfer, and a wait as short as ordinary work."""
    assert polls(recorded(us, wait, tmp_path)) == []


@pytest.mark.parametrize(("us", "ends", "waits"), [(150, 140, True), (50, 40, False), (150, 160, False)])
def test_a_long_call_that_outlasts_its_own_copy_waits_for_it(tmp_path, us, ends, waits):
    events = [launch(1, 0, name="cudaMemcpyAsync", duration=us), kernel("Memcpy DtoH", 5, ends - 5, correlation=1)]
    view = view_of(read_trace(write(tmp_path / "t.json", events)), "0", NAMES.kind_of)
    assert [call.sync for call in view.calls] == [waits]


@pytest.mark.parametrize(("launched_us", "named"), [(-5, True), (5, False)])
def test_nothing_to_overlap_if_the_next_kernel_was_queued(launched_us, named, tmp_path):
    """Kernels start 10 us after the end of a transfer. launched_us: from the end of the transfer."""
    events = []
    for i in range(8):
        end = 410 * i
        events += [launch(i + 1, end + launched_us), kernel("a", end + 10, 300, correlation=i + 1)]
        events.append(kernel("ncclDevKernel", end + 310, 100, stream=8))
    case = case_of(view_of(read_trace(write(tmp_path / "t.json", events)), "0", NAMES.kind_of))
    assert len(find_nothing_else(case, case.graph.recorded, 500.0)) == named
