"""The share of communication that segments could hide: as worked out by hand, and never below what a run reached."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.overlap.pair_time import Await, Begin, Computation, least_time
from moe_dualpipe.tools.profiler import NAMES, analyze, read_trace
from moe_dualpipe.tools.profiler.host import host_as_device
from moe_dualpipe.tools.profiler.measure import possible_share, recorded_events
from tests.support.traces import annotation, kernel, operator, write

LABELS = "dispatch(F)", "combine(F)", "dispatch(B)", "sizes"
computes, starts = (
    st.builds(Computation, st.integers(0, 6)),
    st.builds(Begin, st.sampled_from(LABELS), st.integers(0, 9)),
)
drawn = st.lists(computes | computes | starts | st.builds(Await, st.sampled_from(LABELS)), max_size=14)


D, C = "dispatch(F)", "combine(F)"


@pytest.mark.parametrize(("events", "least"), [
    ([], 0),
    ([Begin(D, 5), Computation(3), Await(D)], 5),
    ([Begin(D, 5), Computation(9), Await(D), Computation(1)], 10),
    ([Begin(D, 5), Computation(9)], 9),  # nothing waits for it
    ([Begin(D, 4), Begin(C, 3), Computation(2), Await(C)], 7),  # one link: the second follows the first
    ([Computation(6), Begin(D, 4), Await(D)], 10),  # not before it is launched
    ([Begin(D, 2), Begin(D, 6), Await(D), Computation(1), Await(D)], 8),  # waits take transfers in their order
    ([Begin(D, 2), Begin(D, 6), Await(D), Computation(9), Await(D)], 11),
    ([Await(D), Computation(3), Begin(D, 2), Await(C)], 3),  # a wait without a transfer
])  # fmt: skip
def test_the_least_time_of_events_and_the_share_that_it_hides(events, least):
    assert least_time(events) == least
    sending = sum(event.time for event in events if isinstance(event, Begin))
    computing = sum(event.time for event in events if isinstance(event, Computation))
    expected = pytest.approx(1 - (least - computing) / sending) if sending else None
    assert possible_share(events) == expected


def recorded(path, events, gaps):
    """Write the recording of a CPU that ran the events, with a gap of so many us before each."""
    clock, link, found, arrives = 10.0, 0.0, [], {label: deque() for label in LABELS}
    for event, gap in zip(events, gaps, strict=True):
        clock += gap
        match event:
            case Computation(time):
                found.append(operator("aten::mm", clock, time))
                clock += time
            case Begin(label, time):
                named = "prepare dispatch(F)" if label == "sizes" else label
                found += [annotation(named, clock, 0.5), annotation("link::carry", clock, 0.5)]
                link = max(link, clock)
                found.append(annotation("link:carry", link, time, thread=2))
                link += time
                arrives[label].append(link)
                clock += 0.5
            case Await(label):
                end = max(clock, arrives[label].popleft()) if arrives[label] else clock
                found += [
                    annotation(f"wait for {label}", clock, end - clock),
                    annotation("link::wait", clock, end - clock),
                ]
                clock = end
    return write(path, found)


@settings(max_examples=50, deadline=None)
@given(drawn, st.data())
def test_a_run_never_hides_more_than_possible(tmp_path_factory, events, data):
    path = tmp_path_factory.mktemp("bound") / "trace.json"
    events = [
        Computation(3),
        Begin("dispatch(F)", 7),
        *(e._replace(time=e.time + 1) if isinstance(e, Begin) else e for e in events),
    ]
    slow = data.draw(st.booleans())
    gaps = [data.draw(st.integers(0, 5)) if slow else 0 for _ in events]
    trace = host_as_device(read_trace(recorded(path, events, gaps)), NAMES)
    (analysis,), found = analyze(trace), recorded_events(trace)
    assert [e for e in found if isinstance(e, Begin)] == [
        Begin(e.label, pytest.approx(e.time)) for e in events if isinstance(e, Begin)
    ]  # fmt: skip
    possible, reached = possible_share(found), analysis.hidden_fraction
    assert possible is not None and reached is not None and reached <= possible + 1e-6
    if not slow:  # only the calls that start a transfer take time, half a us each
        assert possible == pytest.approx(possible_share(events), abs=0.6 * len(events) / 8)


def test_transfers_at_the_same_time_share_the_link(tmp_path):
    events = [
        operator("aten::mm", 0, 4), annotation("dispatch(F)", 4, 1), annotation("link::carry", 4, 1),
        annotation("link:carry", 5, 10, thread=2), annotation("dispatch(B)", 6, 1), annotation("link::carry", 6, 1),
        annotation("link:carry", 7, 12, thread=3), operator("aten::mm", 8, 6),
    ]  # fmt: skip
    found = recorded_events(host_as_device(read_trace(write(tmp_path / "a.json", events)), NAMES))
    assert [event for event in found if isinstance(event, Begin)] == [
        Begin("dispatch(F)", 11),
        Begin("dispatch(B)", 4),
    ]
    assert sum(event.time for event in found if isinstance(event, Computation)) == 10


def test_a_gpu_has_no_bound(tmp_path):
    assert possible_share(recorded_events(read_trace(write(tmp_path / "a.json", [kernel("nccl", 0, 1)])))) is None
