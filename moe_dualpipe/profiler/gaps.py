"""Explain the time without computation: which communication ran, what computed next, and whether the host was late.

If the next computation was already queued, it waited for data. If the host had not launched it yet, the host was late,
possibly because it was inside a call that waits for the device.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..overlap.labels import letter_of
from .intervals import Intervals, intervals_of, length_before, union
from .trace import DeviceEvent, Trace

_NEARBY = 64
"""The next annotation is searched among this many events."""
_SYNCHRONISES = re.compile(r"Synchronize|Memcpy(?!.*Async)")


@dataclass(frozen=True, slots=True)
class Wait:
    """All time without computation with the same `during` and `before`. Times are in microseconds."""

    during: str
    """The annotation of the communication in flight. Without one, the name of the communication; "" for none."""
    before: str
    """The next annotation with computation; not `during`, whose computation only unpacks the received rows. Without one
    nearby, the name of the next computation; "" at the end of the trace."""
    times: int
    total_us: float
    host_us: float
    """The part before the host launched the next computation. On a CPU, the part outside known waits."""
    sync_us: float
    """The part of `host_us` in which the host waited for the device."""


def find_waits(
    trace: Trace, gaps: Intervals, compute: Iterable[DeviceEvent], comm: Iterable[DeviceEvent]
) -> tuple[Wait, ...]:
    """Explain all `gaps` between the events of `compute`. Of several transfers in flight, the first one counts."""
    by_start = sorted(compute, key=lambda event: event.start)
    pieces = list(_pieces(gaps.tolist(), list(_first_of(sorted(comm, key=lambda event: event.start)))))
    if not pieces:
        return ()
    starts, ends = np.array([piece[:2] for piece in pieces]).T
    nexts = np.searchsorted(np.array([event.start for event in by_start]), ends)
    keys: dict[tuple[str, str], int] = {}
    key_of = np.empty(len(pieces), dtype=np.int64)
    launched = np.array(ends)
    for i, (piece, following) in enumerate(zip(pieces, nexts.tolist(), strict=True)):
        follower = by_start[following] if following < len(by_start) else None
        during = _name(trace, piece[2])
        key = during, _next(trace, by_start[following : following + _NEARBY], during)
        key_of[i] = keys.setdefault(key, len(keys))
        launched[i] = _launched(trace, follower, starts[i])
    late = np.clip(launched, starts, ends)
    in_call = length_before(union(intervals_of(e for e in trace.launches.values() if _SYNCHRONISES.search(e.name))))
    waited = length_before(union(intervals_of(trace.waits)))

    def sums(weights: Intervals) -> list[float]:
        return np.bincount(key_of, weights, minlength=len(keys)).tolist()

    host = sums((late - starts) - (waited(late) - waited(starts)))
    columns = sums(np.ones(len(pieces))), sums(ends - starts), host, sums(in_call(late) - in_call(starts))
    found = [Wait(*key, int(times), *us) for key, times, *us in zip(keys, *columns, strict=True)]
    return tuple(sorted(found, key=lambda wait: -wait.total_us))


def _next(trace: Trace, events: Sequence[DeviceEvent], during: str) -> str:
    annotations = (trace.annotation_of(event) for event in events)
    named = (other.name for other in annotations if other is not None and other.name != during)
    return next(named, events[0].name if events else "")


def _launched(trace: Trace, event: DeviceEvent | None, unknown: float) -> float:
    """The time at which `event` was queued: the end of its launch; for copies, whose calls can block, the start."""
    launch = trace.launches.get(event.correlation) if event and event.correlation is not None else None
    if event is None or launch is None:
        return unknown
    return launch.start if "memcpy" in event.category else launch.end


def _name(trace: Trace, event: DeviceEvent | None) -> str:
    if event is None:
        return ""
    annotation = trace.annotation_of(event)
    if annotation is not None and event.category == "transfer" and not letter_of(annotation.name):
        return f"{event.name} in {annotation.name}"  # other annotations do not describe the transfer
    return annotation.name if annotation else event.name


_Piece = tuple[float, float, DeviceEvent | None]


def _first_of(events: Sequence[DeviceEvent]) -> Iterator[_Piece]:
    """Cut events, sorted by start, so that they do not overlap. Each moment belongs to the event that started first."""
    cursor = -np.inf
    for event in events:
        if event.end > max(event.start, cursor):
            yield max(event.start, cursor), event.end, event
            cursor = event.end


def _pieces(gaps: Iterable[tuple[float, float]], owned: Sequence[_Piece]) -> Iterator[_Piece]:
    """Cut the gaps where an owner starts or ends. Both lists are sorted and disjoint."""
    first = 0
    for cursor, end in gaps:
        while first < len(owned) and owned[first][1] <= cursor:
            first += 1
        at = first
        while at < len(owned) and owned[at][0] < end:
            start, stop, event = owned[at]
            if start > cursor:
                yield cursor, start, None
            begin, cursor, at = max(start, cursor), min(stop, end), at + 1
            yield begin, cursor, event
        if cursor < end:
            yield cursor, end, None
