"""Recordings of CPUs: which transfer each wait is for, and what is named."""

import pytest

from moe_dualpipe.tools.profiler import NAMES, read_trace
from moe_dualpipe.tools.profiler.doctor.diagnose import examine
from moe_dualpipe.tools.profiler.doctor.replay import SYNC
from moe_dualpipe.tools.profiler.doctor.view import BLOCKED
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.host import host_as_device
from tests.support.traces import annotation, operator, write


def case_of(events, folder):
    trace = host_as_device(read_trace(write(folder / "t.json", events)), NAMES)
    found = examine(trace, "cpu", NAMES.kind_of)
    assert found is not None
    return found.case


def waits(case):
    """Name of each wait, and start and end of the transfer that it is for."""
    found = case.graph.edges.keep(case.graph.edges.kind == SYNC)
    events, calls = case.event_of[found.source_node].tolist(), case.call_of[found.target].tolist()
    rows = [(case.view.calls[c].name, case.view.start[e], case.view.end[e]) for e, c in zip(events, calls, strict=True)]
    return sorted(rows, key=lambda wait: wait[2])


def test_a_wait_is_for_what_its_annotation_started(tmp_path):
    """Sizes are those of "prepare dispatch(F)"; a second wait for dispatch(F) is for the second dispatch."""
    events = [
        annotation("prepare dispatch(F)", 0, 1000), operator("aten::add", 0, 100), annotation("link::carry", 500, 10),
        annotation("link:carry", 500, 600, thread=2), operator("aten::add", 1200, 10),
        annotation("dispatch(F)", 1000, 1000), annotation("wait for sizes", 1000, 200),
        annotation("link::carry", 1500, 10), annotation("link:carry", 1500, 700, thread=2),
        annotation("dispatch(F)", 2000, 500), annotation("link::carry", 2100, 10),
        annotation("link:carry", 2200, 3000, thread=2),
        annotation("wait for dispatch(F)", 2500, 100), annotation("mlp(F)", 2600, 500), operator("aten::mm", 2600, 500),
        annotation("wait for dispatch(F)", 3100, 2200), annotation("mlp(F)", 5300, 500),
    ]  # fmt: skip
    named = "wait for dispatch(F)"
    assert waits(case_of(events, tmp_path)) == [(BLOCKED, 500, 1100), (named, 1500, 2200), (named, 2200, 5200)]


@pytest.mark.parametrize(("name", "kind", "cost_us", "gains"), [
    ("mlp(B)", "host-sync", 4 * 5050, 4 * 5050), ("step", "nothing-to-overlap", 4 * 5000, None),
])  # fmt: skip
def test_a_sum_over_ranks_that_blocks(name, kind, cost_us, gains, tmp_path):
    """In each of four annotations: a segment that reads a number at once is named, another wait is only a wait."""
    events = [
        event for start in range(0, 80_000, 20_000) for event in (
            annotation(name, start, 19_000), operator("aten::mm", start, 4000),
            operator("c10d::allreduce_", start + 4000, 50),
            annotation("gloo:all_reduce", start + 4100, 5000, thread=2),
            operator("aten::item", start + 9100, 10), operator("aten::mm", start + 9110, 9000),
        )
    ]  # fmt: skip
    files = analyze_files([write(tmp_path / "t.json", events)], pictures=False)
    [verdict] = files.devices[0].analysis.verdicts
    assert (verdict.kind, verdict.cost_us) == (kind, cost_us)
    assert verdict.gain_us == (gains and pytest.approx(gains, abs=100))
