"""Divide the time of a device among labels, so that each moment has exactly one.

Two kernels can run at the same moment, so sums over kernels can exceed the time. Here a moment belongs to the
computation that started first, without computation to the communication that started first, and otherwise to no one.
The lengths of all labels, with the idle time, add up to the window exactly.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .intervals import EMPTY, Intervals, difference, intersection, length_before, total, union
from .trace import DeviceEvent


class Label(NamedTuple):
    """What a device did at one moment."""

    category: str
    """Such as "GEMM"; "communication" for exposed communication, "idle" for nothing."""
    phase: str = ""
    """The annotation or module; "" if unknown."""


IDLE = Label("idle")


@dataclass(frozen=True)
class Partition:
    """The time of one device between `start` and `end`, divided among labels. Times are in microseconds."""

    start: float
    end: float
    pieces: Mapping[Label, Intervals]
    """Disjoint intervals of each label; the rest is idle."""

    def totals(self) -> dict[Label, float]:
        """The time of each label, with IDLE. The sum is the window."""
        found = {label: total(intervals) for label, intervals in self.pieces.items()}
        return found | {IDLE: self.end - self.start - sum(found.values())}

    def between(self, starts: np.ndarray, ends: np.ndarray) -> dict[Label, np.ndarray]:
        """The time of each label in each of several spans, with IDLE. The sum is the length of the span."""
        found = {}
        rest = ends - starts
        for label, intervals in self.pieces.items():
            before = length_before(intervals)
            found[label] = before(ends) - before(starts)
            rest = rest - found[label]
        return found | {IDLE: rest}


def divide(
    compute: Iterable[DeviceEvent], comm: Iterable[DeviceEvent], label_of: Callable[[DeviceEvent], Label]
) -> Partition:
    """Divide the time from the first start to the last end. compute: kernels and copies."""
    owned = _owned(compute, label_of)
    busy = union(np.concatenate([EMPTY, *owned.values()]))
    for label, intervals in _owned(comm, label_of).items():
        owned[label] = union(np.concatenate([owned.get(label, EMPTY), difference(intervals, busy)]))
    every = np.concatenate([EMPTY, *owned.values()])
    start, end = (float(every[:, 0].min()), float(every[:, 1].max())) if len(every) else (0.0, 0.0)
    return Partition(start, end, {label: intervals for label, intervals in owned.items() if len(intervals)})


def cut(partition: Partition, start: float, end: float) -> Partition:
    """The part between two moments."""
    span = np.array([[start, end]])
    pieces = {label: intersection(intervals, span) for label, intervals in partition.pieces.items()}
    return Partition(start, end, {label: intervals for label, intervals in pieces.items() if len(intervals)})


def _owned(events: Iterable[DeviceEvent], label_of: Callable[[DeviceEvent], Label]) -> dict[Label, Intervals]:
    """The moments that belong to each label. A moment belongs to the event that started first."""
    ordered = sorted(events, key=lambda event: event.start)
    if not ordered:
        return {}
    times = np.array([(event.start, event.end) for event in ordered])
    reach = np.maximum.accumulate(times[:, 1])
    times[1:, 0] = np.maximum(times[1:, 0], reach[:-1])
    codes: dict[Label, int] = {}
    of = np.array([codes.setdefault(label_of(event), len(codes)) for event in ordered])
    return {label: union(times[of == code]) for label, code in codes.items()}
