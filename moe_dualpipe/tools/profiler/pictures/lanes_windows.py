"""Which parts of the time an image of lanes shows: all of it and, if names do not fit there, a detail.

The detail is short enough for most names, but not so short that its frame could not be seen. It lies where much work
is: many traces are idle in the middle, or wait for one long transfer.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..kernel_names import short_name
from ..lanes import COMMUNICATION, COMPUTATION, Lanes, Run, runs

if TYPE_CHECKING:
    from .lanes import Picture

NAMED_SHARE = 0.9  # the detail is so short that names fit into runs with this share of the named time
LABEL_LETTERS = 20  # as many letters of a long name count as enough
SHORTEST_SHARE = 1 / 40  # of the whole time
_ENOUGH_WORK = 0.9  # of the most work that a detail of this length could show
_PLACES = 400

Window = tuple[float, float]


def windows_of(pictures: Sequence["Picture"], letter_inches: float, inches: float) -> list[Window]:
    """Return the whole time and, if names do not fit there, a detail, in us.

    letter_inches, inches: the width of a letter and of a lane.
    """
    end = max(picture.end_us for picture in pictures)
    found = [(picture.lanes, run) for picture in pictures for run in runs(picture.lanes, end / 400)]
    lengths = np.array([run.end - run.start for _, run in found])
    if not lengths.sum():
        return [(0.0, end)]
    letters = np.array([min(len(label_of(lanes, run)), LABEL_LETTERS) for lanes, run in found])
    per_inch = lengths / (letter_inches * (1 + letters))  # at most this many us per inch
    order = np.argsort(-per_inch, kind="stable")
    enough = np.searchsorted(np.cumsum(lengths[order]), NAMED_SHARE * lengths.sum())
    length = max(float(inches * per_inch[order][min(enough, len(order) - 1)]), SHORTEST_SHARE * end)
    if length > 0.8 * end:
        return [(0.0, end)]
    start = _busy_start(pictures, length, end)
    return [(0.0, end), (start, start + length)]


def label_of(lanes: Lanes, run: Run) -> str:
    return lanes.phases[run.phase] if run.phase >= 0 else short_name(lanes.names[run.name])


def _busy_start(pictures: Sequence["Picture"], length: float, end: float) -> float:
    """Return the start of the detail: of the places with much work, the one nearest to the middle.

    The middle is that of the time which all pictures cover.
    """
    middle = (max(picture.shift_us for picture in pictures) + min(picture.end_us for picture in pictures)) / 2
    starts = np.append(np.linspace(0.0, end - length, _PLACES), np.clip(middle - length / 2, 0.0, end - length))
    work = np.zeros(len(starts))
    for picture in pictures:
        for lane in (COMPUTATION, COMMUNICATION):
            busy = picture.lanes.busy(picture.lanes.lane == lane) + picture.shift_us
            work += time_until(busy, starts + length) - time_until(busy, starts)
    good = starts[work >= _ENOUGH_WORK * work.max()]
    return float(good[np.argmin(np.abs(good + length / 2 - middle))])


def time_until(intervals: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the length of the intervals before each of the times."""
    if not len(intervals):
        return np.zeros(len(times))
    ends = np.cumsum(intervals[:, 1] - intervals[:, 0])
    before = np.stack([np.concatenate([[0.0], ends[:-1]]), ends], axis=1)
    return np.interp(times, intervals.reshape(-1), before.reshape(-1))
