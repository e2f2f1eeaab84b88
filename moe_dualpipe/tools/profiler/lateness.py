"""Who was late for the collectives of several ranks, how often, and why.

The rank that joins a collective last makes the others wait. Since the collective before of the same ranks, it did the
same part of the program as they, and took longer. What each rank did in this time is compared, label by label
(partition.py), with the mean of the others. Computation counts from when a rank itself joined the collective before,
because it may compute beside that transfer while it waits for others; all other time counts from when the last rank had
joined. Without computation beside waits, the differences add up to the mean wait. No common clock is needed, but before
the first collective of a group, where the recordings begin.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
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
    before: dict[frozenset[int], Meeting] = {}
    exposed = [length_before(rank.exposed) for rank in comparison.ranks]
    for meeting in sorted(comparison.meetings, key=lambda one: _common_time(comparison, one)):
        wider = [
            other for members, other in before.items() if members.issuperset(meeting.members)
            and all(other.event_of(one).end <= meeting.event_of(one).start for one in meeting.members)
        ]  # fmt: skip
        earlier = max(wider, key=lambda other: other.event_of(meeting.members[0]).end, default=None)
        before[frozenset(meeting.members)] = meeting
        late, others = meeting.last, len(meeting.members) - 1
        wait = sum(meeting.waited_us) / others
        if wait < LEAST_WAIT_US:
            continue
        last[late] += 1
        delayed[late] += wait
        begun = _begin(comparison, meeting, earlier)
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


def _common_time(comparison: Comparison, meeting: Meeting) -> float:
    """When the first member joined, on the common clock."""
    member = meeting.members[0]
    return comparison.clocks[member].at(meeting.events[0].start - comparison.ranks[member].start_us)


def _begin(comparison: Comparison, meeting: Meeting, before: Meeting | None) -> list[tuple[float, float]]:
    """When each member joined the last meeting before of all these members, and when all had joined; without such a
    meeting, when all members were being recorded. On the member's own clock."""
    if before is not None:
        events = [before.event_of(member) for member in meeting.members]
        return [(event.start, event.end - before.shortest_us) for event in events]
    clocks = [comparison.clocks[member] for member in meeting.members]
    latest = max(clock.shift_us for clock in clocks)
    starts = [comparison.ranks[member].start_us for member in meeting.members]
    begun = [start + clock.since(latest) for start, clock in zip(starts, clocks, strict=True)]
    return [(time, time) for time in begun]
