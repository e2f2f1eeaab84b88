"""Who made the other ranks wait, and why: its account, beside the mean of the others'.

A collective ends on all ranks when the last one has joined. The time until then, in which the others have nothing else
to do, is an entry of their accounts. All ranks run the same program, so what the late rank did longer than the others
is the reason. If another rank is late each time, these differences are small.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from .account import WAITING, Entry, Key, totals, without_next
from .ranks import Comparison


class Reason(NamedTuple):
    kind: str
    detail: str
    us: float
    """How much longer than on the other ranks, on average."""


@dataclass(frozen=True, slots=True)
class Lateness:
    """How one rank delayed others."""

    joined: int
    """Number of its collectives that could be compared."""
    last: int
    """Number of those that it joined last."""
    waited_us: float
    """How long the others had nothing to do but wait for it: the mean over them."""
    reasons: tuple[Reason, ...]
    """What took longer, the longest first."""


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


def lateness(
    comparison: Comparison, names: Sequence[str], accounts: Sequence[Sequence[Entry]]
) -> tuple[Lateness | None, ...]:
    """Return how each rank delayed others. None for ranks without collectives that could be compared."""
    others = max(len(accounts) - 1, 1)
    waited: dict[str, float] = defaultdict(float)
    sums = [defaultdict[Key, float](float) for _ in accounts]
    for own, entries in zip(sums, accounts, strict=True):
        for total in totals(entries):
            if total.kind == WAITING:
                waited[total.detail.partition(", ")[0]] += total.us / others
            else:
                own[total.kind, without_next(total.detail)] += total.us
    mean: dict[Key, float] = defaultdict(float)
    for own in sums:
        for key, us in own.items():
            mean[key] += us / others
    result = []
    for rank, (joined, own) in enumerate(zip(comparison.joined, sums, strict=True)):
        last = sum(meeting.last == rank for meeting in joined.values())
        longer = [Reason(*key, us - (mean[key] - us / others)) for key, us in own.items()]
        reasons = sorted((one for one in longer if one.us > 0), key=lambda one: -one.us)
        result.append(Lateness(len(joined), last, waited[names[rank]], tuple(reasons)) if joined else None)
    return tuple(result)
