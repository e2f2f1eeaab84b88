"""Who was late for the collectives of several ranks, how often, and why.

The rank that joins a collective last makes the others wait. Since the collective before of the same ranks, it did the
same part of the program as they, and took longer. The account of this time is compared with the mean of the others'.
Computation counts from when a rank itself joined the collective before, because it may compute beside that transfer
while it waits for others; all other time counts from when the last rank had joined. Without computation beside waits,
the differences add up to the mean wait. No common clock is needed.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from .account import COMPUTATION, COPY, SLOWED, WAITING, Entry, Key, between
from .intervals import length_before
from .matching import Meeting
from .ranks import Comparison

LEAST_WAIT_US = 1.0
"""Nobody was late for a collective if the others waited less than this on average."""
_LEAST_SHARE = 0.001  # of the delay, for a reason
COMPUTES = COMPUTATION, SLOWED, COPY


class Reason(NamedTuple):
    kind: str
    detail: str
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
    """Of the time of each entry: 1 for the late rank, together -1 for the others."""
    joined: float
    """When this rank had joined the collective before."""
    start: float
    """When all ranks had."""
    end: float


def waits_for_ranks(comparison: Comparison, names: Sequence[str]) -> list[list[Entry]]:
    """For each rank, the times in which a collective waited for the last rank to join. names: of the ranks."""
    every = []
    for position, (rank, joined) in enumerate(zip(comparison.ranks, comparison.joined, strict=True)):
        found, reach = list[Entry](), -inf
        for index, meeting in sorted(joined.items(), key=lambda item: rank.transfers[item[0]].start):
            start, end = max(rank.transfers[index].start, reach), rank.transfers[index].end - meeting.shortest_us
            if meeting.last != position and end > start:
                found.append(Entry(start, end, WAITING, names[meeting.last]))
                reach = end
        every.append(found)
    return every


def lateness(comparison: Comparison, accounts: Sequence[Sequence[Entry]]) -> tuple[Lateness | None, ...]:
    """Return how each rank delayed others. None for ranks without collectives that could be compared."""
    size = len(comparison.ranks)
    last, delayed, alone = np.zeros(size, np.int64), np.zeros(size), np.zeros(size)
    spans: dict[int, list[_Span]] = defaultdict(list)
    before: dict[frozenset[int], Meeting] = {}
    exposed = [length_before(rank.exposed) for rank in comparison.ranks]
    for meeting in sorted(comparison.meetings, key=comparison.time_of):
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
        for member, event in zip(meeting.members, meeting.events, strict=True):
            if earlier is not None:
                joined, weight = earlier.event_of(member), 1.0 if member == late else -1 / others
                spans[member].append(_Span(late, weight, joined.start, joined.end - earlier.shortest_us, event.start))
            waited = np.array([event.start, event.end - meeting.shortest_us])
            alone[late] += np.diff(exposed[member](waited))[0] / others
    differences: dict[Key, np.ndarray] = defaultdict(lambda: np.zeros(size))
    own, theirs = np.zeros(size), np.zeros(size)
    for member, found in spans.items():
        late, weight, joined, starts, ends = (np.array(column) for column in zip(*found, strict=True))
        since_start, since_joined = (between(accounts[member], t, ends, attrgetter("key")) for t in (starts, joined))
        for key in since_start:
            computes = key[0] in COMPUTES
            times = (since_joined if computes else since_start)[key]
            differences[key] += np.bincount(late, weight * times, minlength=size)
            if computes:
                own += np.bincount(late, np.maximum(weight, 0) * times, minlength=size)
                theirs += np.bincount(late, np.maximum(-weight, 0) * times, minlength=size)
    result = []
    for rank, joined in enumerate(comparison.joined):
        reasons = [Reason(*key, float(us[rank])) for key, us in differences.items()]
        kept = [reason for reason in reasons if last[rank] and abs(reason.us) > _LEAST_SHARE * delayed[rank]]
        ratio = float(own[rank] / theirs[rank]) if theirs[rank] else None
        kept.sort(key=lambda reason: -reason.us)
        times = float(delayed[rank]), float(alone[rank])
        result.append(Lateness(len(joined), int(last[rank]), *times, ratio, tuple(kept)) if joined else None)
    return tuple(result)
