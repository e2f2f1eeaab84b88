"""The lanes of a device: one row per event, rows of streams, runs of phases."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler import read_trace
from moe_dualpipe.tools.profiler.analyze import analyze
from moe_dualpipe.tools.profiler.communication import Names
from moe_dualpipe.tools.profiler.lanes import MAX_ROWS, device_lanes, runs
from moe_dualpipe.tools.profiler.trace import DeviceEvent, Trace
from tests.support.lanes import Work, lanes_of
from tests.support.traces import annotation, kernel, launch, write


def event(name, start, end, stream="7", category="kernel", device="0"):
    return DeviceEvent(name, category, start, end, device, stream, None, 0)


def test_columns_of_a_trace(tmp_path):
    trace = read_trace(write(tmp_path / "trace.json", [
        annotation("attn(F)", 0, 10), annotation("dispatch(B)", 10, 10), annotation("attn(F)", 20, 10),
        launch(1, 5), launch(2, 15), launch(3, 25), launch(4, 6),
        kernel("gemm", 100, 5, correlation=1), kernel("add", 107, 3, correlation=4),
        kernel("ncclX", 103, 9, correlation=2, stream=8), kernel("gemm", 120, 4, correlation=3),
        kernel("Memcpy HtoD", 130, 1, cat="gpu_memcpy"), kernel("gemm", 0, 1000, device=1),
    ]))  # fmt: skip
    lanes = device_lanes(trace, "0")
    assert lanes.start.tolist() == [0, 3, 7, 20, 30]
    assert lanes.end.tolist() == [5, 12, 10, 24, 31]
    assert lanes.lane.tolist() == [0, 1, 0, 0, 2]
    assert [lanes.names[i] for i in lanes.name] == ["gemm", "ncclX", "add", "gemm", "Memcpy HtoD"]
    assert [lanes.streams[i] for i in lanes.stream] == ["7", "8", "7", "7", "7"]
    assert [lanes.phases[i] if i >= 0 else "" for i in lanes.phase] == [
        "attn(F)", "dispatch(B)", "attn(F)", "attn(F)", "",
    ]  # fmt: skip
    assert lanes.phase[0] == lanes.phase[2] != lanes.phase[3]  # two annotations of one name
    assert lanes.exposed.tolist() == [[5, 7], [10, 12]]
    assert lanes.end_us == 31
    assert device_lanes(trace, "0", Names(comm="gemm")).lane.tolist() == [1, 1, 0, 1, 2]
    assert device_lanes(trace, "none").end_us == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("gncm"), st.integers(0, 60), st.integers(1, 9), st.integers(0, 6)), min_size=1)
)
def test_exposed_time_is_that_of_the_analysis(drawn):
    names = {"g": "gemm", "n": "ncclA", "c": "Memcpy DtoD", "m": "add"}
    events = [
        event(names[what], start, start + length, str(stream), "gpu_memcpy" if what == "c" else "kernel")
        for what, start, length, stream in drawn
    ]
    trace = Trace(device_events=events, num_events=len(events))
    lanes, (analysis,) = device_lanes(trace, "0"), analyze(trace)
    assert sum(stop - start for start, stop in lanes.exposed.tolist()) == pytest.approx(analysis.exposed_comm_us)
    assert sum(stop - start for start, stop in lanes.busy(lanes.lane >= 0).tolist()) == pytest.approx(
        analysis.window_us - analysis.idle_us
    )


def test_streams_that_run_at_once_have_their_own_rows():
    events = [
        event("gemm", 0, 50, "1"), event("gemm", 60, 100, "1"), event("add", 40, 50, "2"), event("add", 52, 58, "3"),
        event("ncclA", 0, 100, "4"),
    ]  # fmt: skip
    lanes = device_lanes(Trace(device_events=events), "0")
    rows = {(lanes.streams[s], row) for s, row in zip(lanes.stream, lanes.row.tolist(), strict=True)}
    assert rows == {("1", 0), ("2", 1), ("3", 0), ("4", 0)}  # the busiest first; stream 3 fits into its gap


def test_streams_that_run_at_once_for_a_part_of_their_time_do_not_share_a_row():
    """Streams 1 and 2 share 10 of 100 us, and streams 1 and 3 less than clocks are exact."""
    events = [event("a", 0, 1_000, "1"), event("b", 990, 1_090, "2"), event("c", 999.8, 1_099.8, "3")]
    lanes = device_lanes(Trace(device_events=events), "0")
    assert lanes.row.tolist() == [0, 1, 0]


def test_rows_are_bounded():
    events = [event("gemm", 0, 100 + i, str(i)) for i in range(200)]
    lanes = device_lanes(Trace(device_events=events), "0")
    assert sorted(set(lanes.row.tolist())) == [*range(MAX_ROWS)]
    assert (lanes.row == MAX_ROWS - 1).sum() == 200 - MAX_ROWS + 1


def test_runs_end_at_another_phase_a_gap_and_another_row():
    lanes = lanes_of(
        Work("a", 0, 2, phase="x"), Work("b", 2, 4, phase="x"), Work("b", 5, 6), Work("b", 6, 7), Work("c", 7, 8),
        Work("a", 18, 20), Work("a", 21, 22), Work("n", 0, 9, lane=1), Work("a", 0, 1, row=1, phase="x"),
    )  # fmt: skip
    found = [(run.lane, run.row, run.start, run.end, lanes.names[run.name]) for run in runs(lanes, 3.0)]
    assert found == [
        (0, 0, 0, 4, "a"), (0, 0, 5, 7, "b"), (0, 0, 7, 8, "c"), (0, 0, 18, 22, "a"), (0, 1, 0, 1, "a"),
        (1, 0, 0, 9, "n"),
    ]  # fmt: skip
    assert len(runs(lanes, 0.5)) == 7
    assert runs(lanes_of(), 1.0) == []


def test_a_run_ends_with_its_longest_event():
    """In one row, a later event can end earlier."""
    (run,) = runs(lanes_of(Work("a", 0, 10), Work("a", 2, 3)), 0.0)
    assert (run.start, run.end) == (0, 10)
    assert np.isclose(lanes_of(Work("a", 0, 10), Work("a", 2, 3)).end_us, 10)
