"""The graph of dependencies of a GPU's work, from what a trace records and from when things happened.

recorded     the order of calls in a thread with the host's work between them; launch -> kernel; the order of a
             stream; calls that wait for the device
inputs       what streams wait for on other streams (inputs.py)
"""

import numpy as np

from .inputs import CLOCK, edges_of
from .replay import ASSUMED, SYNC, Floats, Graph, Ints, Waits, with_delays
from .view import View

_LATENCY = 10.0  # at most so much of a launch's latency, beyond the call itself, is taken for unavoidable
_SHORT_CALL = 5.0  # what a call that waits takes without waiting
_FULL_QUEUE = 900  # launches block when about 1,000 are queued
_BLOCKED = 100.0
_GAP = 1.0
"""Microseconds between two kernels of a stream where the trace does not show it."""
_LEAST_GAPS = 8


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
    before_lag[nodes.event] = gap_of(view, previous)
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
    starts, ends = (np.array([getattr(call, edge) for call in view.calls]) for edge in ("start", "end"))
    launch = view.launch[known]
    most = _LATENCY + float(np.median(ends[launch] - starts[launch]))
    return float(np.clip(np.percentile(view.start[known] - starts[launch], 5), 0.0, most))


def gap_of(view: View, previous: Ints) -> float:
    """The usual time between two events of a stream of which the second was launched long before."""
    known = np.flatnonzero((previous >= 0) & (view.launch >= 0))
    launched = np.array([call.end for call in view.calls] or [0.0])[view.launch[known]]
    queued = known[launched + _LATENCY < view.end[previous[known]]]
    gaps = view.start[queued] - view.end[previous[queued]]
    return float(np.clip(np.percentile(gaps, 25), 0.0, _GAP)) if len(gaps) >= _LEAST_GAPS else _GAP


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
    source, target, kinds = (np.array(column, np.int64) for column in edges_of(view, ready_times(view)))
    lags = np.where(kinds == ASSUMED, 0.0, view.start[target] - view.end[source])
    columns.append((nodes.event[source], nodes.event[target], lags, kinds))
    merged = Waits(*(np.concatenate(parts) for parts in zip(*columns, strict=True)))
    return merged.keep(merged.source < merged.target)
