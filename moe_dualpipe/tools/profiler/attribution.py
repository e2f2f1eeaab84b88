"""Divide the time of a device among labels, so that each moment has exactly one.

Two kernels can run at the same moment, so sums over kernels can exceed the time. Here a moment belongs to the
computation that started first, without computation to the communication that started first, and otherwise to no one.
Then it is LATE_HOST until the host has launched the next event, and IDLE after that. The lengths of all labels add up
to the window exactly.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np

from .categories import category_of
from .communication import Names
from .intervals import EMPTY, Intervals, difference, intersection, intervals_of, length_before, union
from .phases import Phases
from .trace import DeviceEvent, Trace

COMMUNICATION, WAITING = "communication", "waiting"
Owner = TypeVar("Owner", "Label", str)


class Label(NamedTuple):
    """What a device did at one moment."""

    category: str
    """Such as "GEMM"; COMMUNICATION for an exposed transfer, WAITING for the part of it in which a rank was missing."""
    phase: str = ""
    """The annotation or module; "" if unknown."""
    rank: int | None = None
    """Of WAITING: the position of the rank that was missing."""


IDLE, LATE_HOST = Label("idle"), Label("not launched")


@dataclass(frozen=True)
class Partition:
    """The time of one device between `start` and `end`, divided among labels. Times are in microseconds."""

    start: float
    end: float
    pieces: Mapping[Label, Intervals]
    """Disjoint intervals of each label; the rest is idle."""

    def between(self, starts: np.ndarray, ends: np.ndarray) -> dict[Label, np.ndarray]:
        """The time of each label in each of several spans, with IDLE. The sum is the length of the span."""
        found = {}
        rest = ends - starts
        for label, intervals in self.pieces.items():
            before = length_before(intervals)
            found[label] = before(ends) - before(starts)
            rest = rest - found[label]
        return found | {IDLE: rest}

    def with_waits(self, waits: Mapping[int, Intervals]) -> "Partition":
        """Label the exposed communication inside `waits`, by missing rank, as WAITING. The waits are disjoint."""
        pieces: dict[Label, Intervals] = {}
        every = union(np.concatenate([EMPTY, *waits.values()]))
        for label, intervals in self.pieces.items():
            if label.category != COMMUNICATION:
                pieces[label] = intervals
                continue
            for rank, spans in waits.items():
                waiting = Label(WAITING, "", rank)
                pieces[waiting] = union(np.concatenate([pieces.get(waiting, EMPTY), intersection(intervals, spans)]))
            pieces[label] = difference(intervals, every)
        return replace(self, pieces={label: intervals for label, intervals in pieces.items() if len(intervals)})


def divide(
    compute: Iterable[DeviceEvent], comm: Iterable[DeviceEvent], label_of: Callable[[DeviceEvent], Label],
    late_host: Intervals = EMPTY,
) -> Partition:  # fmt: skip
    """Divide the time from the first start to the last end.

    compute: kernels and copies. late_host: time in which nothing runs and the host is late.
    """
    owned = owners(compute, label_of)
    busy = union(np.concatenate([EMPTY, *owned.values()]))
    for label, intervals in owners(comm, label_of).items():
        owned[label] = union(np.concatenate([owned.get(label, EMPTY), difference(intervals, busy)]))
    every = np.concatenate([EMPTY, *owned.values()])
    start, end = (float(every[:, 0].min()), float(every[:, 1].max())) if len(every) else (0.0, 0.0)
    owned[LATE_HOST] = late_host
    return Partition(start, end, {label: intervals for label, intervals in owned.items() if len(intervals)})


def work_of(trace: Trace, events: Sequence[DeviceEvent], names: Names, phases: Phases) -> Partition:
    """What the device of `events` did at each moment."""
    by_name: dict[tuple[str, str], str] = {}

    def label_of(event: DeviceEvent) -> Label:
        kind = names.kind_of(event)
        category = by_name.get((event.name, kind)) or by_name.setdefault(
            (event.name, kind), COMMUNICATION if kind == "comm" else category_of(event, kind)
        )
        return Label(category, phases.phase_of(event))

    comm = [event for event in events if names.kind_of(event) == "comm"]
    others = [event for event in events if names.kind_of(event) != "comm"]
    return divide(others, comm, label_of, late_host(trace, events))


def late_host(trace: Trace, events: Sequence[DeviceEvent]) -> Intervals:
    """The time in which nothing ran, and the host had not launched the next event. A CPU has no other host."""
    if events and events[0].device == "cpu":
        return EMPTY
    ordered = sorted(events, key=lambda event: event.start)
    busy = union(intervals_of(ordered))
    starts = np.array([event.start for event in ordered])
    rows = []
    for (_, end), (following, _) in zip(busy[:-1].tolist(), busy[1:].tolist(), strict=True):
        launch = trace.launch_of(ordered[int(np.searchsorted(starts, following))])
        if launch is not None and launch.end > end:
            rows.append((end, min(launch.end, following)))
    return np.array(rows) if rows else EMPTY


def owners(events: Iterable[DeviceEvent], label_of: Callable[[DeviceEvent], Owner]) -> dict[Owner, Intervals]:
    """The moments that belong to each label. A moment belongs to the event that started first."""
    ordered = sorted(events, key=lambda event: event.start)
    if not ordered:
        return {}
    times = np.array([(event.start, event.end) for event in ordered])
    reach = np.maximum.accumulate(times[:, 1])
    times[1:, 0] = np.maximum(times[1:, 0], reach[:-1])
    codes: dict[Owner, int] = {}
    of = np.array([codes.setdefault(label_of(event), len(codes)) for event in ordered])
    return {label: union(times[of == code]) for label, code in codes.items()}
