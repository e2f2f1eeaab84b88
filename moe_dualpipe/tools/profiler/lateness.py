"""Who was late for the collectives of several ranks, how often, and why.

The rank that joins a collective last makes the others wait. Since the collective before of the same ranks, it did the
same part of the program as they, and took longer. What each rank did in this time is compared, label by label
(partition.py), with the mean of the others. Computation counts from when a rank itself joined the collective before,
because it may compute beside that transfer while it waits for others; all other time counts from when the last rank had
joined. Without computation beside waits, the differences add up to the mean wait. No common clock is needed, but before
the first collective of a group, where the recordings begin.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from .attribution import COMMUNICATION, IDLE, LATE_HOST, WAITING, Label, Partition
from .intervals import EMPTY, Intervals, as_intervals, difference, length_before, union
from .matching import Meeting
from .ranks import Comparison

LEAST_WAIT_US = 1.0
"""Nobody was late for a collective if the others waited less than this on average."""
_LEAST_SHARE = 0.001  # of the delay, for a reason
NOT_COMPUTING = COMMUNICATION, WAITING, IDLE.category, LATE_HOST.category
"""The categories of labels other than kernels and copies."""


class Reason(NamedTuple):
    label: Label
    us: float
    """How much longer than on the other ranks, on average; negative if it was shorter."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How one rank delayed others."""

    joined: int
    """Number of its collectives that could be compared."""
    last: int
    """Number of those that it joined last, and the others waited for it."""
    delayed_us: float
    """How long the others waited for it: of each collective the mean, in total."""
    exposed_us: float
    """The part of `delayed_us` in which the others did nothing else."""
    compute_ratio: float | None
    """Its computation before these collectives, relative to that of the others; None if unknown."""
    reasons: tuple[Reason, ...]
    """What took longer or shorter before these collectives, the longest first. What delayed collectives of two groups
    counts twice, as it does in `delayed_us`."""


class _Span(NamedTuple):
    """What one rank did before a collective for which `late` was late."""

    late: int
    weight: float
    """Of the time of each label: 1 for the late rank, together -1 for the others."""
    joined: float
    """When this rank had joined the collective before."""
    start: float
    """When all ranks had."""
    end: float


def partitions(comparison: Comparison) -> list[Partition] | None:
    """The work of each rank, with waits for other ranks; None if the work of a rank was not collected."""
    found = []
    for position, (rank, joined) in enumerate(zip(comparison.ranks, comparison.joined, strict=True)):
        if rank.work is None:
            return None
        waits: dict[int, list[tuple[float, float]]] = defaultdict(list)
        for index, meeting in sorted(joined.items(), key=lambda item: rank.transfers[item[0]].start):
            event = rank.transfers[index]
            if meeting.last != position and event.end - meeting.shortest_us > event.start:
                waits[meeting.last].append((event.start, event.end - meeting.shortest_us))
        found.append(rank.work.with_waits(_disjoint({one: union(as_intervals(w)) for one, w in waits.items()})))
    return found


def _disjoint(waits: dict[int, Intervals]) -> dict[int, Intervals]:
    """A moment that two transfers wait belongs to the first of their ranks."""
    taken = EMPTY
    for rank in sorted(waits):
        waits[rank] = difference(waits[rank], taken)
        taken = union(np.concatenate([taken, waits[rank]]))
    return waits


def lateness(comparison: Comparison, work: Sequence[Partition]) -> tuple[Lateness | None, ...]:
    """Return how each rank delayed others. None for ranks without collectives that could be compared."""
    size = len(comparison.ranks)
    last, delayed, alone = np.zeros(size, np.int64), np.zeros(size), np.zeros(size)
    spans: dict[int, list[_Span]] = defaultdict(list)
    before, exposed = _Before(comparison), [length_before(rank.exposed) for rank in comparison.ranks]
    for meeting in comparison.meetings:
        late, others = meeting.last, len(meeting.members) - 1
        wait = sum(meeting.waited_us) / others
        if wait < LEAST_WAIT_US:
            continue
        last[late] += 1
        delayed[late] += wait
        begun = before.begin(meeting)
        known = all(start <= event.start for (_, start), event in zip(begun, meeting.events, strict=True))
        for member, (joined, start), event in zip(meeting.members, begun, meeting.events, strict=True):
            if known:
                spans[member].append(_Span(late, 1.0 if member == late else -1 / others, joined, start, event.start))
            waited = np.array([event.start, event.end - meeting.shortest_us])
            alone[late] += np.diff(exposed[member](waited))[0] / others
    differences: dict[Label, np.ndarray] = defaultdict(lambda: np.zeros(size))
    own, theirs = np.zeros(size), np.zeros(size)
    for member, found in spans.items():
        late, weight, joined, starts, ends = (np.array(column) for column in zip(*found, strict=True))
        since_start, since_joined = work[member].between(starts, ends), work[member].between(joined, ends)
        for label in since_start:
            computes = label.category not in NOT_COMPUTING
            times = (since_joined if computes else since_start)[label]
            differences[label] += np.bincount(late, weight * times, minlength=size)
            if computes:
                own += np.bincount(late, np.maximum(weight, 0) * times, minlength=size)
                theirs += np.bincount(late, np.maximum(-weight, 0) * times, minlength=size)
    result = []
    for rank, joined in enumerate(comparison.joined):
        reasons = [Reason(label, float(us[rank])) for label, us in differences.items()]
        kept = [reason for reason in reasons if last[rank] and abs(reason.us) > _LEAST_SHARE * delayed[rank]]
        ratio = float(own[rank] / theirs[rank]) if theirs[rank] else None
        kept.sort(key=lambda reason: -reason.us)
        times = float(delayed[rank]), float(alone[rank])
        result.append(Lateness(len(joined), int(last[rank]), *times, ratio, tuple(kept)) if joined else None)
    return tuple(result)


class _Before:
    """Finds when the members of a meeting were last known to be at the same moment."""

    def __init__(self, comparison: Comparison):
        self._comparison = comparison
        self._of: dict[frozenset[int], list[Meeting]] = defaultdict(list)
        for meeting in comparison.meetings:
            self._of[frozenset(meeting.members)].append(meeting)
        self._ends = lru_cache(maxsize=None)(self._sorted_ends)

    def begin(self, meeting: Meeting) -> list[tuple[float, float]]:
        """When each member joined the last meeting before `meeting` with all its members, and when all had joined.

        Both on the member's own clock. Without such a meeting, when all members were being recorded.
        """
        first, begun = meeting.members[0], meeting.events[0].start
        best: list[tuple[float, float]] = []
        for members in self._of:
            if not members.issuperset(meeting.members):
                continue
            ends, meetings = self._ends(members, first)
            for earlier in self._fitting(meetings[: bisect_right(ends, begun)], meeting):
                events = [earlier.events[earlier.members.index(member)] for member in meeting.members]
                found = [(event.start, event.end - earlier.shortest_us) for event in events]
                best = found if not best or found[0][1] > best[0][1] else best
                break
        return best or [(start, start) for start in self._recording(meeting)]

    def _sorted_ends(self, members: frozenset[int], first: int) -> tuple[list[float], list[Meeting]]:
        ends = [(m.events[m.members.index(first)].end, i) for i, m in enumerate(self._of[members])]
        return [end for end, _ in sorted(ends)], [self._of[members][i] for _, i in sorted(ends)]

    @staticmethod
    def _fitting(earlier: Sequence[Meeting], meeting: Meeting) -> Iterator[Meeting]:
        """The earlier meetings that ended on all members before `meeting` began there, the latest first."""
        for other in reversed(earlier):
            ends = (other.events[other.members.index(member)].end for member in meeting.members)
            if all(end <= event.start for end, event in zip(ends, meeting.events, strict=True)):
                yield other

    def _recording(self, meeting: Meeting) -> list[float]:
        """When all members were being recorded."""
        clocks = [self._comparison.clocks[member] for member in meeting.members]
        latest = max(clock.shift_us for clock in clocks)
        starts = [self._comparison.ranks[member].start_us for member in meeting.members]
        return [start + clock.since(latest) for start, clock in zip(starts, clocks, strict=True)]
