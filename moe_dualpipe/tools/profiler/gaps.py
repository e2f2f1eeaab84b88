"""Explain the time in which no kernel computed: what ran instead, what computed next, and whether the host was late.

If the next computation was already queued, it waited for data. If the host had not launched it yet, the host was late.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .attribution import owners
from .intervals import EMPTY, Intervals, difference, intersection, intervals_of, length_before, union
from .phases import Phases
from .trace import DeviceEvent, Trace

_NEARBY = 64
"""The next annotation is searched among this many events."""


@dataclass(frozen=True, slots=True)
class Wait:
    """All time without computation with the same `during` and `before`. Times are in microseconds."""

    during: str
    """The communication in flight, or else the copy, as `Phases.name_of` calls it; "" for neither."""
    before: str
    """The next phase with computation; not `during`, whose computation only unpacks the received rows. Without one
    nearby, the name of the next kernel; "" at the end of the trace."""
    times: int
    total_us: float
    host_us: float | None
    """The part before the host launched the next computation. On a CPU, the part outside known waits. None if no launch
    of a next computation is recorded."""


def find_waits(
    trace: Trace, phases: Phases, gaps: Intervals, compute: Iterable[DeviceEvent], comm: Iterable[DeviceEvent],
    copies: Iterable[DeviceEvent] = (),
) -> tuple[Wait, ...]:  # fmt: skip
    """Explain all `gaps` between the events of `compute`.

    Of several transfers in flight, the first one counts. Copies count where no transfer is in flight.
    """
    by_start = sorted(compute, key=lambda event: event.start)
    pieces, taken = [], EMPTY
    for events in (comm, copies):
        owned = {name: difference(own, taken) for name, own in owners(events, phases.name_of).items()}
        for name, own in owned.items():
            pieces += [(start, end, name) for start, end in intersection(own, _touched(gaps, own)).tolist()]
        taken = union(np.concatenate([taken, *owned.values()]))
    pieces += [(start, end, "") for start, end in difference(gaps, taken).tolist()]
    if not pieces:
        return ()
    starts, ends = np.array([piece[:2] for piece in pieces]).T
    nexts = np.searchsorted(np.array([event.start for event in by_start]), ends).tolist()
    launches = [trace.launch_of(by_start[i]) if i < len(by_start) else None for i in nexts]
    launched = np.array([launch.end if launch else np.nan for launch in launches])
    keys: dict[tuple[str, str], int] = {}
    key_of = np.empty(len(pieces), dtype=np.int64)
    for i, ((_, _, during), following) in enumerate(zip(pieces, nexts, strict=True)):
        key = during, _next(phases, by_start[following : following + _NEARBY], during)
        key_of[i] = keys.setdefault(key, len(keys))
    known = np.isfinite(launched)
    late = np.where(known, np.clip(launched, starts, ends), starts)
    waited = length_before(union(intervals_of(trace.waits)))

    def sums(weights: Intervals) -> list[float]:
        return np.bincount(key_of, weights, minlength=len(keys)).tolist()

    host = sums((late - starts) - (waited(late) - waited(starts)))
    columns = sums(np.ones(len(pieces))), sums(ends - starts), host
    found = [Wait(*key, int(times), *us) for key, times, *us in zip(keys, *columns, strict=True)]
    found = [wait if number else replace(wait, host_us=None) for wait, number in zip(found, sums(known), strict=True)]
    return tuple(sorted(found, key=lambda wait: -wait.total_us))


def _touched(gaps: Intervals, own: Intervals) -> Intervals:
    """The gaps that overlap `own`: there can be many names, and each has few of the gaps."""
    steps = np.zeros(len(gaps) + 1)
    np.add.at(steps, np.searchsorted(gaps[:, 1], own[:, 0], side="right"), 1)
    np.add.at(steps, np.searchsorted(gaps[:, 0], own[:, 1], side="left"), -1)
    return gaps[np.cumsum(steps)[:-1] > 0]


def _next(phases: Phases, events: Sequence[DeviceEvent], during: str) -> str:
    named = (phases.name_of(event) for event in events if phases.is_named(event))
    return next((name for name in named if name != during), events[0].name if events else "")
