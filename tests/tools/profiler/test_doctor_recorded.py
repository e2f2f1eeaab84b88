"""Inputs of work: those that a trace records as waits of streams, and those that are inferred."""

import numpy as np
import pytest

from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.doctor.dependencies import ready_times
from moe_dualpipe.tools.profiler.doctor.inputs import edges_of
from moe_dualpipe.tools.profiler.doctor.recorded import recorded_inputs
from moe_dualpipe.tools.profiler.doctor.replay import ASSUMED, DATA
from moe_dualpipe.tools.profiler.doctor.view import view_of
from tests.support.traces import annotation, kernel, launch, write


def wait(correlation, time, **arguments):
    return {"ph": "X", "cat": "cuda_sync", "name": "Stream Wait Event", "ts": time, "dur": 1, "pid": 0, "tid": 9,
            "args": {"correlation": correlation, "device": 0, "stream": 9} | arguments}  # fmt: skip


def inputs(tmp_path, *waits, calls=()):
    """The names of the inputs of each piece of work.

    The host launches `early` and `late` on stream 7, and then `first` and `second` on stream 9. It records an event
    (call 2) between `early` and `late`, and queues a wait (call 4) before `first`.
    """
    times = {"early": (1, 10, 7), "late": (3, 30, 7), "first": (5, 50, 9), "second": (6, 60, 9)}
    events = [launch(2, 20, name="cudaEventRecord"), launch(4, 40, name="cudaStreamWaitEvent"), *calls, *waits]
    for i, (name, (correlation, time, stream)) in enumerate(times.items()):
        events += [launch(correlation, time), kernel(name, 100 + 50 * i, 40, stream=stream, correlation=correlation)]
    trace = read_trace(write(tmp_path / "t.json", events))
    work = sorted(trace.device_events, key=lambda event: event.start)
    starts = [times[event.name][1] for event in work]
    found = recorded_inputs(trace, "0", work, np.arange(len(work)), starts)
    return found and {work[target].name: [work[i].name for i in sources] for target, sources in found.items()}


def test_a_wait_is_for_what_was_launched_before_the_event_was_recorded(tmp_path):
    recorded = wait(4, 41, wait_on_stream=7, wait_on_cuda_event_record_corr_id=2)
    assert inputs(tmp_path, recorded) == {"first": ["early"]}
    assert inputs(tmp_path, recorded, recorded) == {"first": ["early"]}


def test_if_the_record_is_unknown_the_wait_itself_is_the_latest_time(tmp_path):
    assert inputs(tmp_path, wait(4, 41, wait_on_stream=7)) == {"first": ["late"]}
    assert inputs(tmp_path, wait(99, 55, wait_on_stream=7)) == {"second": ["late"]}  # a call that was not recorded


@pytest.mark.parametrize("arguments", [
    {"wait_on_stream": -1}, {"wait_on_stream": 9}, {"wait_on_stream": 8},
    {"wait_on_stream": 7, "wait_on_cuda_event_record_corr_id": 7},
], ids=str)  # fmt: skip
def test_waits_without_an_input(tmp_path, arguments):
    """An unknown stream, the own one, one without work, and an event recorded before all work."""
    calls = [launch(7, 5, name="cudaEventRecord")]
    assert inputs(tmp_path, wait(4, 41, **arguments), calls=calls) == {}


def test_a_wait_after_all_work_one_for_the_own_stream_and_a_trace_without_waits(tmp_path):
    assert inputs(tmp_path, wait(99, 70, wait_on_stream=7)) == inputs(tmp_path, wait(99, 55, wait_on_stream=9)) == {}
    assert inputs(tmp_path) is None
    assert inputs(tmp_path, wait(4, 41, wait_on_stream=7, device=1)) is None


@pytest.mark.parametrize(("waits", "of_transfer", "of_kernel"), [(0, 0, 0), (1, 1, 0), (2, 1, 1), (3, 1, 2)])
def test_a_transfer_uses_up_one_of_the_queued_waits(tmp_path, waits, of_transfer, of_kernel):
    """The kernel is launched after the transfer, and a second kernel after it. Another thread queues a wait."""
    events = [launch(10 + i, 10 + i, name="cudaStreamWaitEvent") for i in range(waits)]
    events.append(launch(9, 15, thread=2, name="cudaStreamWaitEvent"))
    for i, name in enumerate(("ncclDevKernel", "gemm", "gemm")):
        events += [launch(i, 20 + 5 * i), kernel(name, 100 + 50 * i, 40, stream=8 if i else 9, correlation=i)]
    trace = read_trace(write(tmp_path / "t.json", events))
    view = view_of(trace, "0", NAMES.kind_of)
    assert view.num_waits.tolist() == [of_transfer, of_kernel, 0]
    assert view.may_wait.tolist() == [of_transfer > 0, of_kernel > 0, False]


def inferred(events, folder):
    """The view of a trace, and its dependencies: sources, targets and kinds."""
    view = view_of(read_trace(write(folder / "t.json", events)), "0", NAMES.kind_of)
    return view, [*zip(*edges_of(view, ready_times(view)), strict=True)]


@pytest.mark.parametrize(("after_us", "kind"), [(4, DATA), (20, ASSUMED)])
def test_a_transfer_that_starts_soon_after_its_input_waited_for_it(after_us, kind, tmp_path):
    events = [launch(1, 0), launch(2, 2), kernel("gemm", 10, 100, correlation=1)]
    events.append(kernel("ncclDevKernel", 110 + after_us, 50, stream=8, correlation=2))
    assert inferred(events, tmp_path)[1] == [(0, 1, kind)]


def test_a_kernel_after_a_queued_wait_needs_the_transfer_that_ended_last(tmp_path):
    """The one that was launched last ended before."""
    events = [launch(1, 0), launch(2, 2), launch(3, 4, name="cudaStreamWaitEvent"), launch(4, 6)]
    events += [kernel("ncclDevKernel", 10 + i, us, stream=8 + i, correlation=1 + i) for i, us in enumerate((290, 90))]
    assert inferred([*events, kernel("gemm", 400, 50, correlation=4)], tmp_path)[1] == [(0, 2, ASSUMED)]


def test_input_and_weight_gradients_belong_to_the_backward_chunk(tmp_path):
    letters = "FBIW"
    events = [event for i, letter in enumerate(letters) for event in (
        annotation(f"mlp({letter})", 10 * i, 8), launch(i, 10 * i + 2), kernel("gemm", 100 + 10 * i, 9, correlation=i)
    )]  # fmt: skip
    view, _ = inferred(events, tmp_path)
    assert view.letters == ["F", "B", "B", "B"] and view.is_wgrad.tolist() == [False, False, False, True]
