"""A CPU as the device: computation from operators and annotations, communication from transfers, and what waits."""

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler import NAMES, Names, TraceError, analyze, read_trace
from moe_dualpipe.tools.profiler.doctor.calls import BLOCKED
from moe_dualpipe.tools.profiler.doctor.device import Device
from moe_dualpipe.tools.profiler.files import analyze_files
from moe_dualpipe.tools.profiler.host import as_device
from moe_dualpipe.tools.profiler.trace import HostEvent, Trace
from tests.support.traces import annotation, operator, write


def traced(tmp_path, events, names=NAMES):
    return as_device(read_trace(write(tmp_path / "trace.json", events)), names)


def pieces(tmp_path, events):
    """Name, start and end of each computation, sorted by thread and start."""
    work = traced(tmp_path, events).device_events
    return [
        (w.name, w.start, w.end) for w in sorted(work, key=lambda w: (w.stream, w.start)) if w.category == "operator"
    ]


# ---- Computation ----


KINDS = ("aten::a", "aten::b", "c10d::x", "attn(F)", "mlp(B)", "wait for attn(F)", "step")
marks = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 16), st.integers(0, 12), st.integers(1, 2)), max_size=12
)


def evaluated(open_marks):
    """The computation inside nested events, outermost first: a name, or None if nothing computes."""
    name, in_operator = None, False
    for event in open_marks:
        if event.name.startswith("c10d::"):
            return None
        if event.name.startswith("wait for "):
            name, in_operator = None, False
        elif event.name.endswith(")"):
            name, in_operator = "Python", False
        elif event.name.startswith("aten::"):
            name, in_operator = name if in_operator else event.name, True
    return name


@settings(max_examples=250, deadline=None)
@given(marks)
@example(
    [("aten::a", 0, 10, 1), ("aten::b", 5, 10, 1), ("aten::a", 6, 8, 1), ("attn(F)", 4, 9, 1), ("aten::b", 0, 9, 1)]
)
def test_pieces_agree_with_a_stack_at_every_moment(drawn):
    """Events can overlap without being nested. Then the event that started last counts."""
    every = [HostEvent(name, start, start + length, ("9", str(thread))) for name, start, length, thread in drawn]
    operators = [event for event in every if "::" in event.name]
    annotations = [event for event in every if "::" not in event.name]
    trace = as_device(Trace(operators=operators, annotations=annotations), NAMES)
    found = {}
    for thread in "12":
        works = [work for work in trace.device_events if work.stream == thread]
        assert all(work.start < work.end for work in works)
        assert all(before.end <= after.start for before, after in pairwise(works))
        found |= {(thread, at): work.name for work in works for at in range(int(work.start), int(work.end))}
    in_order = sorted([*operators, *annotations], key=lambda event: (event.start, -event.end))
    expected = {}
    for thread in "12":
        for at in range(30):
            inside = [event for event in in_order if event.thread[1] == thread and event.start <= at < event.end]
            if operators and (name := evaluated(inside)) is not None:
                expected[thread, at] = name
    assert found == expected
    assert all(trace.launches[work.correlation].start == work.start for work in trace.device_events)


# ---- Communication ----


def transfers(tmp_path, events, names=NAMES):
    """Name and start of each transfer and of its launch."""
    trace = traced(tmp_path, events, names)
    found = [(work, trace.launches[work.correlation]) for work in trace.device_events if work.category == "transfer"]
    return [(work.name, work.start, launch.name, launch.start) for work, launch in found]


def test_transfers_are_matched_to_their_calls(tmp_path):
    """In the order of the calls of each kind. The first transfer was launched before the recording."""
    assert transfers(tmp_path, [
        annotation("gloo:all_to_all", 1, 3, thread=5), operator("aten::mm", 0, 1),
        operator("c10d::alltoall_base_", 16, 2), operator("c10d::allreduce_", 13, 2),
        operator("c10d::alltoall_base_", 10, 2), annotation("link::carry", 19, 1),
        annotation("gloo:all_reduce", 14, 30, thread=6), annotation("gloo:all_to_all", 11, 20, thread=5),
        annotation("gloo:all_to_all", 31, 5, thread=5), annotation("link:carry", 50, 5, thread=7),
        annotation("gloo:barrier", 60, 5, thread=5),
    ]) == [
        ("gloo:all_to_all", 1, "gloo:all_to_all", 1), ("gloo:all_to_all", 11, "c10d::alltoall_base_", 10),
        ("gloo:all_reduce", 14, "c10d::allreduce_", 13), ("gloo:all_to_all", 31, "c10d::alltoall_base_", 16),
        ("link:carry", 19, "link::carry", 19), ("gloo:barrier", 60, "gloo:barrier", 60),
    ]  # fmt: skip


def test_a_link_transfer_starts_when_it_is_called_and_the_link_is_free(tmp_path):
    """The recorded start is later: the link's thread wakes up first. The first launch was before the recording."""
    assert transfers(tmp_path, [
        annotation("link:carry", 5, 5, thread=5), annotation("link::carry", 20, 1), annotation("link::carry", 25, 1),
        annotation("link:carry", 23, 17, thread=5), annotation("link:carry", 41, 9, thread=5),
    ]) == [
        ("link:carry", 5, "link:carry", 5), ("link:carry", 20, "link::carry", 20),
        ("link:carry", 40, "link::carry", 25),
    ]  # fmt: skip


def test_annotations_that_match_the_pattern_are_transfers(tmp_path):
    """Waits for matching annotations are not transfers. Python inside them is not computation."""
    events = [
        annotation("push(F)", 0, 10), operator("aten::mm", 2, 3), annotation("wait for push(F)", 20, 10),
        operator("aten::mm", 22, 3), operator("c10d::send", 1, 1),
    ]  # fmt: skip
    trace = traced(tmp_path, events, Names("push"))
    assert [(w.name, w.category, w.start, w.end) for w in trace.device_events] == [
        ("aten::mm", "operator", 2, 5), ("aten::mm", "operator", 22, 25), ("push(F)", "transfer", 0, 10),
    ]  # fmt: skip
    assert sorted(event.name for event in trace.waits) == ["c10d::send", "wait for push(F)"]
    assert [event.name for event in trace.annotations] == ["push(F)"]  # the wait
    assert transfers(tmp_path, [*events, annotation("通信", 12, 5)], Names("通信")) == [("通信", 12, "通信", 12)]


def test_a_trace_without_computation_or_transfers(tmp_path):
    path = write(tmp_path / "trace.json", [operator("c10d::barrier", 0, 3), annotation("wait for x(F)", 5, 5)])
    with pytest.raises(TraceError, match=r"no kernel on a device, and no operator on a CPU, in 2 events$"):
        analyze_files([path])
    assert analyze(read_trace(path)) == ()
    assert transfers(tmp_path, [annotation("gloo:send", 1, 2), annotation("push", 5, 2)], Names("push")) == [
        ("gloo:send", 1, "gloo:send", 1), ("push", 5, "push", 5),
    ]  # fmt: skip


# ---- Collectives that block ----


def reduction(*following, transfer=4000):
    """A collective in attn(F), whose transfer ends at 600 + `transfer`."""
    return [
        annotation("attn(F)", 0, 9000), operator("aten::mm", 0, 400), operator("c10d::allreduce_", 500, 50),
        annotation("gloo:all_reduce", 600, transfer, thread=2), *following,
    ]  # fmt: skip


@pytest.mark.parametrize("blocks,events", [
    *((True, reduction(operator("aten::item", goes_on, 10))) for goes_on in (4600, 5000, 5600)),
    (False, reduction(operator("aten::mm", 4500, 10))), (False, reduction(operator("aten::mm", 5700, 10))),
    (False, reduction(annotation("step", 4000, 10))), (False, reduction()),
    (False, reduction(operator("aten::mm", 1700, 10), transfer=900)),
], ids=["at its end", "soon", "1 ms later", "during it", "later", "an annotation", "the end", "short"])  # fmt: skip
def test_a_collective_that_blocks_is_a_wait(events, blocks, tmp_path):
    """Nothing happens on its thread until the transfer ends, and then something does."""
    python = [start for name, start, _ in pieces(tmp_path, events) if name == "Python"]
    assert python[0] == 400 and (550 not in python) == blocks


# ---- Which transfer each wait is for, and what is named ----


def case_of(events, folder):
    return Device(traced(folder, events))


def waits(case):
    """Name of each wait, and start and end of the transfer that it is for."""
    found, calls = case.syncs
    events = case.graph.edges.source_node[found].tolist()
    rows = [(case.calls[c].name, case.start[e], case.end[e]) for e, c in zip(events, calls.tolist(), strict=True)]
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
    files = analyze_files([write(tmp_path / "t.json", events)])
    found = {verdict.kind: verdict for verdict in files.devices[0].analysis.verdicts}
    assert found.keys() == {kind, "host-bound"}  # nothing happens at the end of each annotation
    verdict = found[kind]
    assert verdict.cost_us == cost_us
    assert verdict.gain_us == (gains and pytest.approx(gains, abs=100))
