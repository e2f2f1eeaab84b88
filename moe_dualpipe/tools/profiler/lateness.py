"""Who made the other ranks wait, and why: its account, beside the mean of the others'.

A collective ends on all ranks when the last one has joined. The time until then, in which the others have nothing else
to do, is an entry of their accounts. All ranks run the same program, so what the late rank did longer than the others
is the reason. If another rank is late each time, these differences are small.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from .account import WAITING, Entry, Key, totals, without_next
from .ranks import Comparison


class Reason(NamedTuple):
    kind: str
    detail: str
    us: float
    """How much longer than on the other ranks, on average."""


class Lateness(NamedTuple):
    """How one rank delayed others."""

    waited_us: float
    """How long the others had nothing to do but wait for it: the mean over them."""
    reasons: tuple[Reason, ...]
    """What took longer, the longest first."""


def waits_for_ranks(comparison: Comparison, names: Sequence[str]) -> list[list[Entry]]:
    """For each rank, the times in which a collective waited for the last rank to join. names: of the ranks."""
    waits: list[list[Entry]] = [[] for _ in comparison.ranks]
    for meeting in comparison.meetings:
        for member, event in zip(meeting.members, meeting.events, strict=True):
            if member != meeting.last:
                waits[member].append(Entry(event.start, event.end - meeting.shortest_us, WAITING, names[meeting.last]))
    return [_in_turn(sorted(own, key=lambda wait: wait.start_us)) for own in waits]


def _in_turn(waits: Sequence[Entry]) -> list[Entry]:
    """Cut waits at the end of the one before."""
    found, reach = list[Entry](), -inf
    for wait in waits:
        start = max(wait.start_us, reach)
        if wait.end_us > start:
            found.append(Entry(start, wait.end_us, wait.kind, wait.detail))
            reach = wait.end_us
    return found


def lateness(names: Sequence[str], accounts: Sequence[Sequence[Entry]]) -> list[Lateness]:
    """Return how each of several ranks delayed others."""
    others = len(accounts) - 1
    waited: dict[str, float] = defaultdict(float)
    sums = [defaultdict[Key, float](float) for _ in accounts]
    mean: dict[Key, float] = defaultdict(float)
    for own, entries in zip(sums, accounts, strict=True):
        for total in totals(entries):
            if total.kind == WAITING:
                waited[total.detail.partition(", ")[0]] += total.us / others
            else:
                own[total.kind, without_next(total.detail)] += total.us
                mean[total.kind, without_next(total.detail)] += total.us / others
    found = []
    for name, own in zip(names, sums, strict=True):
        longer = [Reason(*key, us - (mean[key] - us / others)) for key, us in own.items()]
        reasons = sorted((one for one in longer if one.us > 0), key=lambda one: -one.us)
        found.append(Lateness(waited[name], tuple(reasons)))
    return found
