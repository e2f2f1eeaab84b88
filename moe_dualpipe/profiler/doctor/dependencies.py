"""The graph of dependencies of a GPU's work, from what a trace records and from when things happened.

    recorded     the order of calls in a thread with the host's work between them; launch -> kernel; the order of a
                 stream; calls that wait for the device
    inferred     an event that could have started earlier, and starts within 5 us of the end of work on another stream,
                 depends on it. If the host queued no wait for another stream, or the work belongs to the other chunk,
                 it is not an input: such dependencies are ORDER, which a change may remove
    assumed      inputs that were there in time: of a transfer, the last computation launched before it (of its chunk);
                 of a computation after a queued wait, the last transfer that had ended (of its chunk)

Traces do not say which event a stream waited for, so the assumed inputs are the latest that are possible. Gains are
rather too small than too large.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence

import numpy as np

from .replay import ASSUMED, DATA, ORDER, SYNC, Floats, Graph, Ints, Waits, with_delays
from .view import COMM, View

NEAR = 5.0
"""Microseconds after the end of its input in which an event starts."""
NEAR_ON_CPU = 500.0
"""The same for threads, which take time to wake up."""
LATE = 2.0
"""Microseconds that an event must be late before a reason is looked for."""
CLOCK = 1.0
"""Resolution of the clock, in microseconds."""
_HISTORY = 16
_LATENCY = 10.0  # at most so much of a launch's latency is taken for unavoidable
_SHORT_CALL = 5.0  # what a call that waits takes without waiting
_FULL_QUEUE = 900  # launches block when about 1,000 are queued
_BLOCKED = 100.0

_Edges = tuple[list[int], list[int], list[int]]


class Nodes:
    """Where events and calls are in the graph: its node for each, by their index in the view."""

    def __init__(self, view: View, awaited: Ints):
        calls = len(view.calls)
        starts = np.array([call.start for call in view.calls])
        synced = np.flatnonzero(awaited >= 0)
        ends = np.array([view.calls[i].end for i in synced.tolist()])
        time = np.concatenate([ends, starts, view.start])
        order = np.argsort(time, kind="stable")  # at the same time: ends of waits, calls, events
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        self.time = time[order]
        self.call = place[len(synced) : len(synced) + calls]
        self.call_end = self.call.copy()
        """The node whose end is the end of the call."""
        self.call_end[synced] = place[: len(synced)]
        self.event = place[len(synced) + calls :]


def graph_of(view: View) -> tuple[Graph, Nodes]:
    """Return the graph of a GPU and the nodes of the view's events and calls."""
    awaited = _awaited_events(view)
    nodes = Nodes(view, awaited)
    size = len(nodes.time)
    is_device, duration = np.zeros(size, bool), np.zeros(size)
    before, launch = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    before_lag, launch_lag = np.zeros(size), np.zeros(size)
    _add_calls(view, nodes, awaited, duration, before, before_lag)
    is_device[nodes.event], duration[nodes.event] = True, view.duration
    previous = previous_on_stream(view)
    before[nodes.event] = np.where(previous >= 0, nodes.event[previous], -1)
    launched = view.launch >= 0
    launch[nodes.event[launched]] = nodes.call[view.launch[launched]]
    launch_lag[nodes.event] = latency_of(view)
    before[before >= np.arange(size)] = -1
    launch[launch >= np.arange(size)] = -1
    graph = Graph(
        is_device, nodes.time, duration, before, before_lag, launch, launch_lag, _waits(view, nodes, awaited), duration
    )
    return with_delays(graph), nodes


def latency_of(view: View) -> float:
    """The shortest usual time from the start of a launch to the start of its kernel."""
    known = view.launch >= 0
    if not known.any():
        return 0.0
    calls = np.array([call.start for call in view.calls])
    return float(np.clip(np.percentile(view.start[known] - calls[view.launch[known]], 5), 0.0, _LATENCY))


def previous_on_stream(view: View) -> Ints:
    """The event before each event on its stream; -1 for the first."""
    order = np.argsort(view.stream, kind="stable")
    previous = np.full(len(order), -1, np.int64)
    same = view.stream[order[1:]] == view.stream[order[:-1]]
    previous[order[1:][same]] = order[:-1][same]
    return previous


def ready_times(view: View) -> Floats:
    """When each event was launched and its stream was free."""
    previous = previous_on_stream(view)
    ready = np.where(previous >= 0, view.end[previous], -np.inf)
    calls = np.array([call.start for call in view.calls] or [0.0])
    launched = np.where(view.launch >= 0, calls[view.launch] + latency_of(view), -np.inf)
    return np.minimum(np.maximum(ready, launched), view.start)


def _add_calls(
    view: View, nodes: Nodes, awaited: Ints, duration: Floats, before: Ints, before_lag: Floats
) -> None:  # fmt: skip
    """A call follows the call that ended last before it, on any thread: autograd's thread runs while another waits."""
    if not view.calls:
        return
    starts, ends = (np.array([getattr(call, edge) for call in view.calls]) for edge in ("start", "end"))
    duration[nodes.call] = np.where(awaited >= 0, np.minimum(ends - starts, _SHORT_CALL), ends - starts)
    synced = np.flatnonzero(awaited >= 0)
    before[nodes.call_end[synced]] = nodes.call[synced]
    by_end = np.argsort(ends, kind="stable")
    last = np.searchsorted(ends[by_end], starts, side="right") - 1
    found = np.where(last >= 0, by_end[last], -1)
    own = found == np.arange(len(starts))  # a call without duration
    found[own] = np.where(last[own] >= 1, by_end[last[own] - 1], -1)
    before[nodes.call] = np.where(found >= 0, nodes.call_end[found], -1)
    before_lag[nodes.call] = np.where(found >= 0, starts - ends[found], 0.0)


def _awaited_events(view: View) -> Ints:
    """The event for which each call waited; -1 for calls that did not wait.

    A call waits for the last work of its thread, if that ends while it waits, and otherwise for what ends last before
    the call returns. Launches wait while the queue is full.
    """
    awaited = np.full(len(view.calls), -1, np.int64)
    by_end = np.argsort(view.end, kind="stable")
    ends = view.end[by_end]
    launched_by: dict[int, int] = {}
    for event, call in enumerate(view.launch.tolist()):
        launched_by[call] = event
    latest: dict[tuple[str, str], int] = {}
    call_starts = np.array([call.start for call in view.calls])
    queued = np.searchsorted(np.sort(view.launch), np.arange(len(view.calls))) - np.searchsorted(
        np.sort(view.start), call_starts
    )
    for i, call in enumerate(view.calls):
        own = launched_by.get(i)
        full = own is not None and queued[i] >= _FULL_QUEUE and call.end - call.start > _BLOCKED
        if call.sync or full:
            event = own if call.sync and own is not None else latest.get(call.thread, -1)
            if full or event < 0 or not call.start + CLOCK < view.end[event] <= call.end + CLOCK:
                at = int(np.searchsorted(ends, call.end + CLOCK, side="right")) - 1
                while at >= 0 and ends[at] > call.start + CLOCK and view.launch[by_end[at]] > i:
                    at -= 1
                event = int(by_end[at]) if at >= 0 and ends[at] > call.start + CLOCK else -1
            awaited[i] = event
        if own is not None:
            latest[call.thread] = own
    return awaited


def _waits(view: View, nodes: Nodes, awaited: Ints) -> Waits:
    columns: list[tuple[Ints, Ints, Floats, Ints]] = []
    synced = np.flatnonzero(awaited >= 0)
    if len(synced):
        lags = np.array([view.calls[i].end for i in synced.tolist()]) - view.end[awaited[synced]]
        kinds = np.full(len(synced), SYNC, np.int64)
        columns.append((nodes.event[awaited[synced]], nodes.call_end[synced], lags, kinds))
    for edges in (_inferred(view), _assumed(view)):
        source, target, kinds = (np.array(column, np.int64) for column in edges)
        lags = np.where(kinds == ASSUMED, 0.0, view.start[target] - view.end[source])
        columns.append((nodes.event[source], nodes.event[target], lags, kinds))
    merged = Waits(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))
    return merged.keep(merged.source < merged.target)


def _inferred(view: View) -> _Edges:
    """Dependencies that bind: what ended on another stream when a late event started."""
    edges: _Edges = ([], [], [])
    late = np.flatnonzero(view.start - ready_times(view) > LATE)
    by_end = np.argsort(view.end, kind="stable")
    ends = view.end[by_end]
    ready = ready_times(view)
    last = np.searchsorted(ends, view.start[late] + CLOCK, side="right") - 1
    for target, at in zip(late.tolist(), last.tolist(), strict=True):
        source = _ended_elsewhere(view, by_end, at, target)
        if source >= 0 and view.end[source] > ready[target] + CLOCK:
            is_input = bool(view.may_wait[target]) and same_chunk(view, source, target)
            for column, value in zip(edges, (source, target, DATA if is_input else ORDER), strict=True):
                column.append(value)
    return edges


def _ended_elsewhere(view: View, by_end: Ints, at: int, target: int) -> int:
    """The last event on another stream that ended just before `target` started; of the same chunk, if there is one."""
    other, near = -1, NEAR_ON_CPU if view.is_cpu else NEAR
    while at >= 0 and view.end[by_end[at]] >= view.start[target] - near:
        source = int(by_end[at])
        if view.stream[source] != view.stream[target] and source < target:
            if same_chunk(view, source, target):
                return source
            other = source if other < 0 else other
        at -= 1
    return other


def same_chunk(view: View, one: int, other: int) -> bool:
    """Whether two events may belong to the same chunk."""
    a, b = view.letters[one], view.letters[other]
    return a is None or b is None or a == b


def _assumed(view: View) -> _Edges:
    edges: _Edges = ([], [], [])
    done: dict[tuple[bool, str | None], deque[int]] = defaultdict(lambda: deque(maxlen=_HISTORY))
    order = np.argsort(view.launch, kind="stable")
    for target in order[view.launch[order] >= 0].tolist():
        is_comm, letter = bool(view.kind[target] == COMM), view.letters[target]
        for source in _latest_inputs(view, target, done[not is_comm, letter]):
            for column, value in zip(edges, (source, target, ASSUMED), strict=True):
                column.append(value)
        for known in {letter, None}:
            done[is_comm, known].append(target)
    return edges


def _latest_inputs(view: View, target: int, launched: Sequence[int]) -> Iterator[int]:
    is_comm = view.kind[target] == COMM
    if not view.may_wait[target] or (not is_comm and not view.waits_recorded and view.letters[target] is None):
        return
    ended = [
        source for source in launched
        if view.end[source] <= view.start[target] + CLOCK and view.stream[source] != view.stream[target]
    ]  # fmt: skip
    if ended:
        yield ended[-1] if is_comm else max(ended, key=lambda source: view.end[source])
