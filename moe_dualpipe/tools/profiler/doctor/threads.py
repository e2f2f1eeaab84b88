"""The graph of dependencies of a CPU recording, from what each thread did in which order.

A CPU has no queue: computation, the calls that start transfers, and waits are in the order of their thread. So less
must be inferred than on a GPU (dependencies.py):

    order     what a thread does follows what it did before
    launch    a transfer follows the call that starts it, and the transfer before it on its link
    wait      the thread goes on when the awaited transfer has ended: "wait for dispatch(F)" waits for what the
              annotation dispatch(F) started. Any other gap is a wait for what ended just before the thread went on
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import inf

import numpy as np

from ....overlap.labels import is_wait, letter_of, without_wait
from ..trace import HostEvent, Trace
from .case import Case
from .dependencies import CLOCK, Nodes, waits_of_calls
from .replay import Graph, Ints, graph_of_nodes
from .view import AT_ONCE, BLOCKED, COMM, Call, View

_NEAR = 500.0
"""Microseconds after the end of a transfer in which a thread goes on. It takes time to wake up."""
_LEAST_WAIT = 100.0
"""Microseconds. Shorter gaps of a thread need no explanation."""

_Awaited = tuple[Call, int]
"""A wait, and the transfer that it is for."""


def case_of_threads(view: View, trace: Trace) -> Case:
    """Return the case of a CPU. view: of `trace`, without calls."""
    found = sorted([*_starts(view, trace), *_Waits(view, trace).found()], key=lambda item: item[0][:2])
    launch, awaited = np.full(len(view.events), -1, np.int64), np.full(len(found), -1, np.int64)
    for i, (call, event) in enumerate(found):
        (awaited if call.sync else launch)[i if call.sync else event] = event if call.sync else i
    view = replace(view, calls=[call for call, _ in found], launch=launch)
    return Case(view, *_graph(view, awaited))


def _starts(view: View, trace: Trace) -> Iterator[_Awaited]:
    """The calls that start transfers, each with its transfer."""
    for event in np.flatnonzero(view.kind == COMM).tolist():
        call = trace.launch_of(view.events[event])
        if call is not None and call.name != view.events[event].name:
            yield Call(call.name, call.start - view.origin, call.end - view.origin, call.thread, None, False), event


class _Waits:
    """Finds the waits of all threads, and what each is for."""

    def __init__(self, view: View, trace: Trace):
        self.view, self.trace = view, trace
        self.pieces: dict[str, list[int]] = defaultdict(list)
        """The computation of each thread."""
        self.started: dict[HostEvent, list[int]] = defaultdict(list)
        """The transfers that each annotation started."""
        for i, event in enumerate(view.events):
            if view.kind[i] != COMM:
                self.pieces[event.stream].append(i)
            elif annotation := trace.annotation_of(event):
                self.started[annotation].append(i)
        transfers = np.flatnonzero(view.kind == COMM)
        self.by_end = transfers[np.argsort(view.end[transfers], kind="stable")].tolist()
        self.ends = view.end[self.by_end].tolist()

    def found(self) -> Iterator[_Awaited]:
        waits = sorted((wait for wait in self.trace.waits if is_wait(wait.name)), key=lambda wait: wait.start)
        unawaited: dict[str, deque[HostEvent]] = defaultdict(deque)
        for annotation in sorted(self.started, key=lambda annotation: annotation.start):
            unawaited[annotation.name].append(annotation)
        known: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for wait in waits:
            others = unawaited[without_wait(wait.name)]
            if others and others[0].start < wait.start:
                start, end = wait.start - self.view.origin, wait.end - self.view.origin
                known[wait.thread[1]].append((start, end))
                for event in self.started[others.popleft()]:
                    if (ended := float(self.view.end[event])) <= end + CLOCK:
                        yield Call(wait.name, start, max(start, ended), wait.thread, None, True), event
        yield from self._unnamed(known)

    def _unnamed(self, known: dict[str, list[tuple[float, float]]]) -> Iterator[_Awaited]:
        """Gaps of threads, outside of known waits, in which a transfer ended just before the thread went on.

        A segment that lasts as long as a transfer that it started waits at once.
        """
        for stream, pieces in self.pieces.items():
            for one, other in pairwise(pieces):
                start, end = float(self.view.end[one]), float(self.view.start[other])
                before = bisect_right(known[stream], (end, inf)) - 1
                last = bisect_right(self.ends, end + CLOCK) - 1
                if end - start < _LEAST_WAIT or (before >= 0 and known[stream][before][1] > start):
                    continue
                if last >= 0 and self.ends[last] >= max(start, end - _NEAR):
                    found = self.view.events[self.by_end[last]]
                    call, segment = self.trace.launch_of(found), self.trace.annotation_of(found)
                    if call is not None and call.thread[1] == stream:
                        start = max(start, call.end - self.view.origin)
                    lasts = segment and letter_of(segment.name) and found.end <= segment.end
                    yield Call(AT_ONCE if lasts else BLOCKED, start, end, ("", stream), None, True), self.by_end[last]


def _graph(view: View, awaited: Ints) -> tuple[Graph, Nodes]:
    nodes = Nodes(view, awaited)
    size = len(nodes.time)
    is_device, duration, before_lag = np.zeros(size, bool), np.zeros(size), np.zeros(size)
    before, launch = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    is_device[nodes.event], duration[nodes.event] = True, view.duration
    threads: dict[str, list[int]] = defaultdict(list)
    for event in np.flatnonzero(view.kind != COMM).tolist():
        threads[view.events[event].stream].append(int(nodes.event[event]))
    for call, first, last in zip(view.calls, nodes.call.tolist(), nodes.call_end.tolist(), strict=True):
        threads[call.thread[1]] += {first, last}
    for members in threads.values():
        chain = np.array(sorted(members))
        before[chain[1:]] = chain[:-1]
        before_lag[chain[1:]] = nodes.time[chain[1:]] - (nodes.time + duration)[chain[:-1]]
    before_lag[nodes.call_end[awaited >= 0]] = 0.0  # what remains of a wait is for its transfer
    transfers = np.flatnonzero(view.kind == COMM)
    before[nodes.event[transfers]] = np.where(view.previous >= 0, nodes.event[view.previous], -1)[transfers]
    launched = transfers[view.launch[transfers] >= 0]
    launch[nodes.event[launched]] = nodes.call[view.launch[launched]]
    waits = waits_of_calls(view, nodes, awaited, _NEAR)
    return graph_of_nodes(is_device, nodes.time, duration, before, before_lag, launch, view.latency, waits), nodes
