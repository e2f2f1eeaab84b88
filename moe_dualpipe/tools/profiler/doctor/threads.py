"""The graph of dependencies of a CPU recording, from what each thread did in which order.

A CPU has no queue: computation, the calls that start transfers, and waits are in the order of their thread. So less
must be inferred than on a GPU (dependencies.py):

    order     what a thread does follows what it did before
    launch    a transfer follows the call that starts it, and the transfer before it on its link
    wait      the thread goes on when the awaited transfer has ended: "wait for dispatch(F)" waits for what the
              annotation dispatch(F) started, and "wait for sizes" in it for what "prepare dispatch(F)" started. Any
              other wait is for what its own annotation started, or for what ended last before the thread went on
    ORDER     a transfer that could start earlier starts when a computation ends
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from ....overlap.labels import LINK_WAIT, PREPARE, SIZES_WAIT, is_wait, letter_of, without_wait
from ..trace import HostEvent, Trace, innermost
from .case import Case
from .dependencies import Nodes, latency_of, previous_on_stream, ready_times
from .inputs import CLOCK, NEAR_ON_CPU
from .replay import ORDER, SYNC, Graph, Ints, Waits, merged, with_delays
from .view import COMM, Call, View

AT_ONCE, BLOCKED = "wait at once", "wait"
"""Names of waits that the program does not name: in the annotation that started the transfer, and others."""
_LEAST_WAIT = 100.0
"""Microseconds. Shorter gaps of a thread need no explanation."""
_LATE = 1000.0
"""Microseconds that a transfer must be late before a reason is looked for: threads take time to wake up."""
_NEAR_SHARE = 0.05
"""Of the time that a transfer is late, so much may be the time to wake up."""

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
        number = view.events[event].correlation
        call = trace.launches.get(number) if number is not None else None
        if call is not None and call.name != view.events[event].name:
            yield Call(call.name, call.start - view.origin, call.end - view.origin, call.thread, number, False), event


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
        self.unawaited: dict[str, deque[HostEvent]] = defaultdict(deque)
        """Annotations that started transfers, and for which nothing has waited yet, by name."""
        for annotation in sorted(self.started, key=lambda annotation: annotation.start):
            self.unawaited[annotation.name].append(annotation)
        transfers = np.flatnonzero(view.kind == COMM)
        self.by_end = transfers[np.argsort(view.end[transfers], kind="stable")].tolist()
        self.ends = view.end[self.by_end].tolist()

    def found(self) -> Iterator[_Awaited]:
        waits = [wait for wait in self.trace.waits if is_wait(wait.name) or wait.name == LINK_WAIT]
        waits.sort(key=lambda wait: (wait.start, -wait.end))
        around = self._around(waits)
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for i, wait in enumerate(waits):
            start, end, known = wait.start - self.view.origin, wait.end - self.view.origin, spans[wait.thread[1]]
            if wait.name == LINK_WAIT and known and start < known[-1][1]:
                continue  # inside another wait
            known.append((start, end))
            started = self._started(wait, around.get(i), start, end)
            name = wait.name if is_wait(wait.name) else AT_ONCE if started else BLOCKED
            for event in started or self._ended(start, end):
                yield self._wait(name, wait.thread, start, end, event)
        yield from self._unnamed(spans)

    def _around(self, waits: Sequence[HostEvent]) -> dict[int, HostEvent]:
        """The innermost annotation around each wait without a name of its own."""
        others = [annotation for annotation in self.trace.annotations if annotation.name != without_wait(SIZES_WAIT)]
        found: dict[int, HostEvent] = {}
        for thread in {wait.thread for wait in waits}:
            around = [annotation for annotation in others if annotation.thread == thread]
            found |= innermost(around, [(wait.start, i) for i, wait in enumerate(waits) if wait.thread == thread])
        return found

    def _started(self, wait: HostEvent, around: HostEvent | None, start: float, end: float) -> list[int]:
        """The transfers of the annotation that a wait is for, by their end."""
        started: list[int] = []
        if wait.name == LINK_WAIT:
            started = self.started.get(around, []) if around is not None and letter_of(around.name) else []
        elif wait.name != SIZES_WAIT or around is not None:
            name = PREPARE + around.name if wait.name == SIZES_WAIT and around else without_wait(wait.name)
            if (others := self.unawaited[name]) and others[0].start < wait.start:
                started = self.started[others.popleft()]
        chosen = [i for i in started if self.view.start[i] <= end and self.view.end[i] <= end + CLOCK]
        return sorted(chosen, key=lambda i: self.view.end[i])

    def _ended(self, start: float, end: float) -> list[int]:
        """The transfer that ended last in this time, if the thread could go on because of it."""
        at = bisect_right(self.ends, end + CLOCK) - 1
        return [self.by_end[at]] if at >= 0 and self.ends[at] >= max(start, end - NEAR_ON_CPU) else []

    def _wait(self, name: str, thread: tuple[str, str], start: float, end: float, event: int) -> _Awaited:
        """The time that the thread waits for `event` between start and end; no time if it had ended before."""
        ended = float(self.view.end[event])
        pieces = self.pieces[thread[1]]
        at = bisect_left(pieces, ended - CLOCK, key=lambda i: self.view.start[i])
        before = float(self.view.end[pieces[at - 1]]) if at else start
        after = float(self.view.start[pieces[at]]) if at < len(pieces) else end
        if ended < start or before > ended:
            return Call(name, start, start, thread, None, True), event
        return Call(name, max(start, before), max(min(end, after), ended), thread, None, True), event

    def _unnamed(self, spans: dict[str, list[tuple[float, float]]]) -> Iterator[_Awaited]:
        """Gaps of threads, outside of known waits, in which a transfer ended just before the thread went on."""
        for stream, pieces in self.pieces.items():
            starts = [start for start, _ in spans[stream]]
            for one, other in pairwise(pieces):
                start, end = float(self.view.end[one]), float(self.view.start[other])
                known = bisect_right(starts, end) - 1
                if end - start >= _LEAST_WAIT and (known < 0 or spans[stream][known][1] <= start):
                    for event in self._ended(start, end):
                        yield Call(BLOCKED, start, end, ("", stream), None, True), event


def _graph(view: View, awaited: Ints) -> tuple[Graph, Nodes]:
    nodes = Nodes(view, awaited)
    size = len(nodes.time)
    is_device, duration = np.zeros(size, bool), np.zeros(size)
    is_device[nodes.event], duration[nodes.event] = True, view.duration
    before, launch = np.full(size, -1, np.int64), np.full(size, -1, np.int64)
    before_lag, launch_lag = np.zeros(size), np.full(size, latency_of(view))
    waits = np.flatnonzero(awaited >= 0)
    threads: dict[str, list[int]] = defaultdict(list)
    for event in np.flatnonzero(view.kind != COMM).tolist():
        threads[view.events[event].stream].append(int(nodes.event[event]))
    for call, first, last in zip(view.calls, nodes.call.tolist(), nodes.call_end.tolist(), strict=True):
        threads[call.thread[1]] += {first, last}
    end = nodes.time + duration
    for members in threads.values():
        members.sort()
        chain = np.array(members)
        before[chain[1:]] = chain[:-1]
        before_lag[chain[1:]] = nodes.time[chain[1:]] - end[chain[:-1]]
    before_lag[nodes.call_end[waits]] = 0.0  # what remains of a wait is for its transfer
    transfers = np.flatnonzero(view.kind == COMM)
    previous = previous_on_stream(view)[transfers]
    before[nodes.event[transfers]] = np.where(previous >= 0, nodes.event[previous], -1)
    launched = transfers[view.launch[transfers] >= 0]
    launch[nodes.event[launched]] = nodes.call[view.launch[launched]]
    launch[launch >= np.arange(size)] = -1
    source, target = nodes.event[awaited[waits]], nodes.call_end[waits]
    lag = np.clip(nodes.time[target] - end[source], 0.0, NEAR_ON_CPU)
    sync = Waits(source, target, lag, np.full(len(waits), SYNC, np.int64))
    edges = merged([sync, _late_starts(view, nodes)])
    edges = edges.keep(edges.source < edges.target)
    graph = Graph(is_device, nodes.time, duration, before, before_lag, launch, launch_lag, edges, duration)
    return with_delays(graph), nodes


def _late_starts(view: View, nodes: Nodes) -> Waits:
    """Transfers that start when a computation ends, although they were started before and their link was free."""
    ready = ready_times(view)
    computing = np.flatnonzero(view.kind != COMM)
    computing = computing[np.argsort(view.end[computing], kind="stable")]
    late = np.flatnonzero((view.kind == COMM) & (view.launch >= 0) & (view.start - ready > _LATE))
    last = np.searchsorted(view.end[computing], view.start[late] + CLOCK, side="right") - 1
    source, late = computing[last[last >= 0]], late[last >= 0]
    ended = view.end[source]
    near = np.maximum(NEAR_ON_CPU, _NEAR_SHARE * (view.start[late] - ready[late]))
    bound = (ended > ready[late] + CLOCK) & (view.start[late] - ended <= near)
    source, late = source[bound], late[bound]
    lag = view.start[late] - view.end[source]
    return Waits(nodes.event[source], nodes.event[late], lag, np.full(len(late), ORDER, np.int64))
