"""Laws of the replay: what is unchanged stays, and what becomes shorter never makes anything later."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler import read_trace
from moe_dualpipe.tools.profiler.communication import NAMES
from moe_dualpipe.tools.profiler.doctor.case import case_of
from moe_dualpipe.tools.profiler.doctor.replay import ASSUMED, Graph, Waits, order_of, replay, with_delays
from moe_dualpipe.tools.profiler.doctor.view import view_of
from tests.support.faults import FAULTS, run, write_traces


@st.composite
def graphs(draw):
    """Recorded nodes that depend on earlier ones; many lags contradict the recording."""
    size = draw(st.integers(1, 12))
    us = st.integers(0, 40).map(float)
    start = np.sort(np.array(draw(st.lists(us, min_size=size, max_size=size))))
    duration, lag, launch_lag = (np.array(draw(st.lists(us, min_size=size, max_size=size))) for _ in range(3))
    before, launch = (np.array([draw(st.integers(-1, i - 1)) for i in range(size)], np.int64) for _ in range(2))
    waits = [(draw(st.integers(0, i - 1)), i) for i in range(1, size) if draw(st.booleans())]
    source, target = (np.array([wait[side] for wait in waits], np.int64) for side in (0, 1))
    waited = np.array([draw(us) for _ in waits])
    return with_delays(Graph(
        np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size))), start, duration, before, lag, launch,
        launch_lag, Waits(source, target, waited, np.full(len(waits), ASSUMED, np.int64)), duration,
    ))  # fmt: skip


def reordered(graph, place):
    """The same graph with node i at place[i]."""
    order = np.argsort(place)

    def moved(column):
        return np.where(column >= 0, place[column], -1)[order]

    return Graph(
        graph.is_device[order], graph.start[order], graph.duration[order], moved(graph.before), graph.before_lag[order],
        moved(graph.launch), graph.launch_lag[order],
        graph.waits._replace(source=place[graph.waits.source], target=place[graph.waits.target]), graph.delay[order],
    )  # fmt: skip


@given(graphs())
def test_an_unchanged_replay_gives_the_recorded_times(graph):
    times = replay(graph)
    np.testing.assert_allclose(times.start, graph.start, atol=1e-9)
    np.testing.assert_allclose(times.end, graph.start + graph.duration, atol=1e-9)


@given(graphs())
def test_a_dependency_that_the_recording_contradicts_makes_no_delay_negative(graph):
    assert (graph.delay >= 0).all()


@given(graphs(), st.data())
def test_shorter_nodes_make_nothing_later(graph, data):
    share = np.array(data.draw(st.lists(st.floats(0, 1), min_size=len(graph.start), max_size=len(graph.start))))
    before, after = replay(graph), replay(replace(graph, duration=graph.duration * share))
    assert (after.start <= before.start + 1e-9).all() and (after.end <= before.end + 1e-9).all()


@given(graphs(), st.data())
def test_fewer_waits_make_nothing_later(graph, data):
    gone = data.draw(st.lists(st.booleans(), min_size=len(graph.waits.lag), max_size=len(graph.waits.lag)))
    fewer = replace(graph, waits=graph.waits._replace(lag=np.where(gone, -np.inf, graph.waits.lag)))
    assert (replay(fewer).start <= replay(graph).start + 1e-9).all()


@settings(deadline=None)
@given(graphs(), st.data())
def test_the_numbering_of_the_nodes_does_not_matter(graph, data):
    place = np.array(data.draw(st.permutations(range(len(graph.start)))), np.int64)
    np.testing.assert_allclose(replay(reordered(graph, place)).end[place], replay(graph).end, atol=1e-9)


def test_nodes_that_wait_for_each_other_have_no_order():
    none, both = np.full(2, -1, np.int64), np.array([1, 0], np.int64)
    zero = np.zeros(2)
    waits = Waits(both[:1], both[1:], zero[:1], np.array([ASSUMED]))
    graph = Graph(np.ones(2, bool), zero, zero, none, zero, none, zero, waits, zero)
    assert order_of(graph) is not None
    assert order_of(replace(graph, before=np.array([-1, 0], np.int64))) is None
    with pytest.raises(ValueError, match="wait for each other"):
        replay(replace(graph, before=np.array([-1, 0], np.int64)))


def test_work_in_a_hardware_queue_starts_once_the_work_before_it_has_started():
    """Node 0 takes 10 us, and node 1 follows it. Node 2 needs nothing, and is behind node 1 in a queue."""
    none, zero = np.full(3, -1, np.int64), np.zeros(3)
    before, durations = np.array([-1, 0, -1], np.int64), np.array([10.0, 100.0, 5.0])
    graph = Graph(
        np.ones(3, bool), zero, durations, before, zero, none, zero, Waits(none[:0], none[:0], zero[:0], none[:0]), zero
    )
    assert replay(graph).start.tolist() == [0, 10, 0]
    assert replay(replace(graph, queue=np.array([-1, -1, 1], np.int64))).start.tolist() == [0, 10, 10]


@pytest.mark.parametrize("name", ["host sync", "one queue", "shared stream", "late launch", "no graphs"])
def test_the_replay_of_a_job_gives_its_recorded_times(name, tmp_path):
    for path in write_traces(run(FAULTS[name].apply(FAULTS[name].healthy(), 2)), tmp_path):
        trace = read_trace(path)
        case = case_of(view_of(trace, trace.device_events[0].device, NAMES.kind_of))
        times = replay(case.graph)
        np.testing.assert_allclose(times.start[case.nodes.event], case.view.start, atol=1e-6)
        np.testing.assert_allclose(times.end[case.nodes.event], case.view.end, atol=1e-6)
