"""On which rank, and on what there, the end of a recording of several ranks depended.

The path is followed backwards, from the last event of the rank that ended last. If nothing is computed when a
collective ends, what follows is taken to depend on it. The collective depended on the rank that joined it last, so the
path goes on there, with what this rank did before. So the path has no waits for other ranks that were compared, and its
length is the time from its first event to the last end. Ends of the same collective are the same moment: only the
choice of the rank that ended last needs a common clock.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .attribution import COMMUNICATION, Label, Partition
from .intervals import length_before
from .ranks import Comparison

_TAIL_US = 1.0
"""This last part of a collective must be exposed by half, so that what follows depends on the collective."""


class PathPart(NamedTuple):
    rank: int
    """Position of the rank."""
    label: Label
    us: float


class _Step(NamedTuple):
    """A collective on which what follows on this rank depends, and where the path goes on."""

    end: float
    transfer_us: float
    place: str
    last: int
    """The rank that joined last."""
    joined: float
    """When it joined, on its own clock."""


def critical_path(comparison: Comparison, work: Sequence[Partition]) -> tuple[PathPart, ...]:
    """Return the time on the path of each rank and label, the longest first.

    Ranks without a common clock are left out; () if fewer than two ranks can be compared.
    """
    (root, size), *_ = Counter(clock.root for clock in comparison.clocks).most_common(1)
    if size < 2 or not comparison.meetings:
        return ()
    known = [position for position, clock in enumerate(comparison.clocks) if clock.root == root]
    steps = {position: _steps(comparison, position) for position in known}
    rank = max(known, key=lambda one: comparison.clocks[one].at(work[one].end - comparison.ranks[one].start_us))
    time, found = work[rank].end, defaultdict[tuple[int, Label], float](float)
    while True:
        at = bisect_right(steps[rank], time, key=lambda step: step.end) - 1
        begin = steps[rank][at].end if at >= 0 else work[rank].start
        for label, us in work[rank].between(np.array([begin]), np.array([time])).items():
            found[rank, label] += float(us[0])
        if at < 0:
            parts = [PathPart(*key, us) for key, us in found.items() if us > 0]
            return tuple(sorted(parts, key=lambda part: -part.us))
        step = steps[rank][at]
        found[rank, Label(COMMUNICATION, step.place)] += step.transfer_us
        del steps[rank][at:]  # the path goes back in time
        rank, time = step.last, step.joined


def _steps(comparison: Comparison, position: int) -> list[_Step]:
    """The collectives of a rank at whose end nothing is computed there, sorted by end."""
    rank, found = comparison.ranks[position], []
    exposed = length_before(rank.exposed)
    for index, meeting in comparison.joined[position].items():
        event = rank.transfers[index]
        tail = min(_TAIL_US, event.end - event.start)
        if exposed(np.array(event.end)) - exposed(np.array(event.end - tail)) > tail / 2:
            joined = meeting.events[meeting.members.index(meeting.last)].start
            found.append(_Step(event.end, meeting.shortest_us, rank.places[index], meeting.last, joined))
    return sorted(found)
