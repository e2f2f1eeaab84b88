"""What happened while nothing computed?

Every such moment has something that was on its way, or nothing, and something that computed next and had waited for it.
Either that was queued already, so its data was late; or the host had not launched it yet, so the host was late, perhaps
because it sat in a call that waits for the device.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .host import is_phase
from .intervals import Intervals, as_intervals, length_before, union
from .trace import DeviceEvent, HostEvent, Trace

_NEARBY = 64
"""Among so many works an annotation is looked for."""
_SYNCHRONISES = re.compile(r"Synchronize|Memcpy(?!.*Async)")


@dataclass(frozen=True, slots=True)
class Wait:
    """Moments in which nothing computed, by what was on its way and what computed next. Microseconds."""

    during: str
    """The annotation of the communication, or its own name where it has none; "" where nothing was on its way."""
    before: str
    """The next annotation in which something computed, other than `during`, which unpacks what came. Where there is
    none nearby, the name of what computed next; "" at the end."""
    times: int
    total_us: float
    host_us: float
    """The part in which the host had not launched what computed next; on a CPU, in which the trace names no wait."""
    sync_us: float
    """The part of that in which the host waited for the device."""


def find_waits(
    trace: Trace, gaps: Intervals, compute: Iterable[DeviceEvent], comm: Iterable[DeviceEvent]
) -> tuple[Wait, ...]:
    """All moments of the `gaps` in `compute`; where several transfers are on their way, the first one counts."""
    by_start = sorted(compute, key=lambda work: work.start)
    pieces = list(_pieces(gaps.tolist(), list(_first_of(sorted(comm, key=lambda work: work.start)))))
    if not pieces:
        return ()
    starts, ends = np.array([piece[:2] for piece in pieces]).T
    nexts = np.searchsorted(np.array([work.start for work in by_start]), ends)
    keys: dict[tuple[str, str], int] = {}
    of = np.empty(len(pieces), dtype=np.int64)
    launched = np.array(ends)
    for i, (piece, following) in enumerate(zip(pieces, nexts.tolist(), strict=True)):
        follower = by_start[following] if following < len(by_start) else None
        during = _name(trace, piece[2])
        key = during, _next(trace, by_start[following : following + _NEARBY], during)
        of[i] = keys.setdefault(key, len(keys))
        launched[i] = _launched(trace, follower, starts[i])
    late = np.clip(launched, starts, ends)
    in_call = length_before(_union(mark for mark in trace.launches.values() if _SYNCHRONISES.search(mark.name)))
    waited = length_before(_union(trace.waits))

    def sums(weights: Intervals) -> list[float]:
        return np.bincount(of, weights, minlength=len(keys)).tolist()

    found = [
        Wait(*key, int(times), total, host, sync)
        for key, times, total, host, sync in zip(
            keys,
            sums(np.ones(len(pieces))),
            sums(ends - starts),
            sums((late - starts) - (waited(late) - waited(starts))),
            sums(in_call(late) - in_call(starts)),
            strict=True,
        )
    ]
    return tuple(sorted(found, key=lambda wait: -wait.total_us))


def _next(trace: Trace, works: Sequence[DeviceEvent], during: str) -> str:
    annotations = (trace.annotation_of(work) for work in works)
    named = (mark.name for mark in annotations if mark is not None and mark.name != during)
    return next(named, works[0].name if works else "")


def _launched(trace: Trace, work: DeviceEvent | None, unknown: float) -> float:
    """When the device had what it needed to start `work`. The call of a copy may last until the copy is through."""
    launch = trace.launches.get(work.correlation) if work and work.correlation is not None else None
    if work is None or launch is None:
        return unknown
    return launch.start if "memcpy" in work.category else launch.end


def _union(marks: Iterable[HostEvent]) -> Intervals:
    return union(as_intervals((mark.start, mark.end) for mark in marks))


def _name(trace: Trace, work: DeviceEvent | None) -> str:
    if work is None:
        return ""
    annotation = trace.annotation_of(work)
    if annotation is not None and work.category == "transfer" and not is_phase(annotation):
        return f"{work.name} in {annotation.name}"  # what is around a transfer need not be named after it
    return annotation.name if annotation else work.name


_Piece = tuple[float, float, DeviceEvent | None]


def _first_of(works: Sequence[DeviceEvent]) -> Iterator[_Piece]:
    """Divide the time of works, sorted by start, so that each moment belongs to the one that started first."""
    cursor = -np.inf
    for work in works:
        if work.end > max(work.start, cursor):
            yield max(work.start, cursor), work.end, work
            cursor = work.end


def _pieces(gaps: Iterable[tuple[float, float]], owned: Sequence[_Piece]) -> Iterator[_Piece]:
    """The gaps, cut where another owner begins; both are sorted and disjoint."""
    first = 0
    for cursor, end in gaps:
        while first < len(owned) and owned[first][1] <= cursor:
            first += 1
        at = first
        while at < len(owned) and owned[at][0] < end:
            start, stop, work = owned[at]
            if start > cursor:
                yield cursor, start, None
            begin, cursor, at = max(start, cursor), min(stop, end), at + 1
            yield begin, cursor, work
        if cursor < end:
            yield cursor, end, None
