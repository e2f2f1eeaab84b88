"""The calls of the host that launch work on a device or wait for it.

GPU   calls of the driver. A wait is a call such as cudaStreamSynchronize, a launch that takes longer than its own copy,
      or a time without calls, in which the host polls for a number that a transfer writes.
CPU   the calls that start transfers. Computation needs none: it is in the order of its thread. A wait is an annotation,
      such as "wait for dispatch(F)", or a gap of a thread in which a transfer ended just before the thread went on.
"""

import re
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import inf
from operator import attrgetter
from typing import NamedTuple

from ....overlap.labels import is_wait, letter_of, without_wait
from ..trace import CLOCK, WAITS, WAKE_UP, DeviceEvent, HostEvent, Trace

POLL, AT_ONCE, BLOCKED = "polling for a number", "wait at once", "wait"
"""Names of waits that are not calls: a host that polls; a segment that waits for its own transfer; another wait."""
LONG_CALL = 100.0
"""Microseconds. An ordinary launch takes 5 to 30; one that takes longer than this has waited."""

_FREES = "cudaFree", "hipFree"  # wait, too
_STREAM_WAIT = re.compile(r"StreamWaitEvent")
_LEAST_POLL = 1000.0  # microseconds; the host's own work between two calls is usually shorter
_SOON = 100.0  # microseconds from the end of the transfer until a host that polls goes on
_LEAST_GAP = 100.0  # microseconds; shorter gaps of a thread need no explanation


class Call(NamedTuple):
    """A call that launches work or waits for it. Times in microseconds of the trace, in a view of its window."""

    name: str
    start: float
    end: float
    thread: tuple[str, str]
    sync: bool
    """Whether it may wait for the device."""
    correlation: int | None = None
    """That of the work that it launches."""
    awaits: int = -1
    """The event that it waits for, on a CPU; -1 for none."""


def calls_of_gpu(trace: Trace, events: Sequence[DeviceEvent], transfers: Sequence[int]) -> list[Call]:
    """The calls that launched `events`, and those that may wait, on the same threads. transfers: numbers of events."""
    ends = {event.correlation: event.end for event in sorted(events, key=attrgetter("end"))}
    last = max((event.end for event in events), default=0.0)
    threads = {trace.launches[number].thread for number in ends if number in trace.launches}
    calls = []
    for number, call in trace.launches.items():
        launches, waits = number in ends, call.name in _FREES or WAITS.search(call.name) is not None
        # a launch that outlasts its own kernel or copy waited for it, as for pageable memory
        blocks = launches and call.end >= ends[number] and call.end - call.start > LONG_CALL
        sync = blocks or (waits and call.thread in threads)
        if (sync or launches) and call.start < last:
            calls.append(Call(call.name, call.start, call.end, call.thread, sync, number))
    calls.sort(key=lambda call: (call.start, call.end))
    return [*calls, *_polls(calls, {events[i].correlation: events[i].end for i in transfers})]


def _polls(calls: Sequence[Call], ends: dict[int | None, float]) -> Iterator[Call]:
    """The waits in which the host reads a number in its memory until a kernel has written it.

    DeepEP's dispatch waits like this for the number of rows that will arrive (its README: "implicit CPU wait"). A trace
    shows a long time without calls. The next call follows the end of the transfer that its thread had launched last.
    ends: of transfers, by correlation.
    """
    latest: dict[tuple[str, str], int | None] = {}
    host_end = calls[0].end if calls else 0.0
    for call in calls:
        end = ends.get(latest.get(call.thread), -inf)
        if call.start - host_end >= _LEAST_POLL and end <= call.start <= end + _SOON:
            yield Call(POLL, host_end, call.start, call.thread, True)
        host_end = max(host_end, call.end)
        latest[call.thread] = call.correlation


def queued_waits(trace: Trace, events: Sequence[DeviceEvent], transfers: Sequence[int]) -> list[int]:
    """How many waits for other streams, such as cudaStreamWaitEvent, the host queued before each event; -1: unknown.

    They are counted from the previous launch of the thread. A transfer uses up one of them, as in torch.distributed;
    the others are left for the next launch. Events without a launch have none.
    """
    waits = [(call.start, -1, call.thread) for call in trace.launches.values() if _STREAM_WAIT.search(call.name)]
    if not waits:
        return [-1] * len(events)
    of_transfers = {events[i].correlation for i in transfers}
    launches = [(call.start, number, call.thread) for number, call in trace.launches_of_work()]
    pending: dict[tuple[str, str], int] = defaultdict(int)
    found: dict[int | None, int] = {}
    for _, number, thread in sorted([*waits, *launches]):
        if number < 0:
            pending[thread] += 1
            continue
        found[number] = min(pending[thread], 1) if number in of_transfers else pending[thread]
        pending[thread] = max(pending[thread] - 1, 0) if number in of_transfers else 0
    return [found.get(event.correlation, 0) for event in events]


def calls_of_cpu(trace: Trace, events: Sequence[DeviceEvent], transfers: Sequence[int]) -> Iterator[Call]:
    """The calls that start transfers, and the waits, each with the transfer that it is for."""
    for i in transfers:
        call = trace.launch_of(events[i])
        if call is not None and call.name != events[i].name:
            yield Call(call.name, call.start, call.end, call.thread, False, events[i].correlation)
    known: dict[str, list[HostEvent]] = defaultdict(list)
    for wait, started in _named_waits(trace, events, transfers):
        known[wait.thread[1]].append(wait)
        for i in started:
            if events[i].end <= wait.end + CLOCK:
                yield Call(wait.name, wait.start, max(wait.start, events[i].end), wait.thread, True, awaits=i)
    yield from _unnamed_waits(trace, events, transfers, known)


def _named_waits(
    trace: Trace, events: Sequence[DeviceEvent], transfers: Sequence[int]
) -> Iterator[tuple[HostEvent, list[int]]]:
    """Waits, such as "wait for dispatch(F)", each with the transfers that an annotation dispatch(F) or the wait itself
    started."""
    started: dict[HostEvent, list[int]] = defaultdict(list)
    for i in transfers:
        if annotation := trace.annotation_of(events[i]):
            started[annotation].append(i)
    waits = {wait: wait._replace(name=without_wait(wait.name)) for wait in trace.waits if is_wait(wait.name)}
    pending: dict[str, deque[HostEvent]] = defaultdict(deque)
    for annotation in sorted(started.keys() - waits.values(), key=attrgetter("start")):
        pending[annotation.name].append(annotation)
    for wait, named in sorted(waits.items(), key=lambda item: item[0].start):
        candidates, found = pending[named.name], started.get(named, [])
        if candidates and candidates[0].start < wait.start:
            yield wait, [*started[candidates.popleft()], *found]
        elif found:
            yield wait, found


def _unnamed_waits(
    trace: Trace, events: Sequence[DeviceEvent], transfers: Sequence[int], known: dict[str, list[HostEvent]]
) -> Iterator[Call]:
    """Gaps of threads, outside of `known` waits, in which a transfer ended just before the thread went on.

    A segment that lasts as long as a transfer that it started waits at once.
    """
    by_end = sorted(transfers, key=lambda i: events[i].end)
    ends = [events[i].end for i in by_end]
    threads: dict[str, list[DeviceEvent]] = defaultdict(list)
    for event in events:
        if event.category != "transfer":
            threads[event.stream].append(event)
    for stream, pieces in threads.items():
        for start, end in ((one.end, other.start) for one, other in pairwise(pieces)):
            before = bisect_right(known[stream], end, key=attrgetter("start")) - 1
            last = bisect_right(ends, end + CLOCK) - 1
            if end - start < _LEAST_GAP or (before >= 0 and known[stream][before].end > start):
                continue
            if last >= 0 and ends[last] >= max(start, end - WAKE_UP):
                found = events[by_end[last]]
                call, segment = trace.launch_of(found), trace.annotation_of(found)
                if call is not None and call.thread[1] == stream:
                    start = max(start, call.end)
                    if call.end >= found.end and call.name != found.name:  # the call itself copies the rows
                        continue
                lasts = segment and letter_of(segment.name) and found.end <= segment.end
                yield Call(AT_ONCE if lasts else BLOCKED, start, end, ("", stream), True, awaits=by_end[last])
