"""Compare the traces of several ranks: the offsets between their clocks, and which collectives are the same.

A collective ends on all ranks at the same moment, after the last rank has joined. So it is shortest on the last rank to
join; on other ranks, the extra time is waiting time. This needs no common clock. The ends give the offsets between the
clocks of different hosts. Which collectives are the same is found in matching.py, by process group.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from ...messages import list_ranks, plural
from .account import WAITING, Entry
from .matching import Meeting, RankTransfers, match_collectives

_MEET = 0.9


@dataclass(frozen=True)
class Comparison:
    """What several ranks have in common."""

    ranks: Sequence[RankTransfers]
    meetings: Sequence[Meeting]
    """The same collectives on several ranks."""
    shifts_us: Sequence[float | None]
    """Start of each rank's first event minus the start of rank 0's first event, on one clock. None: unknown."""
    problems: Sequence[str]
    """Groups whose collectives could not be compared, each with the reason."""

    @property
    def sentences(self) -> list[str]:
        """What could not be compared, and why, and which ranks have no trace."""
        found = [f"Not compared: {problem}." for problem in self.problems]
        size = max((rank.world_size or 0 for rank in self.ranks), default=0)
        missing = sorted({*range(size)} - {rank.rank for rank in self.ranks if rank.rank is not None})
        if missing and len(self.ranks) > 1:
            shown = f" ({list_ranks(missing)})" if len(missing) <= 8 else ""
            of = f"{len(missing):,} of {plural(size, 'rank')}"
            found.append(f"{of} have no trace here{shown}: waits for them count as communication.")
        return found


def compare_traces(ranks: Sequence[RankTransfers]) -> Comparison:
    """Compare the ranks by process group.

    Groups are left out if in more than 1 of 10 meetings there is no moment when all ranks are inside. Clocks are not
    exact enough to require this of all meetings.
    """
    by_group, problems = match_collectives(ranks)
    meetings = list[Meeting]()
    for group, found in by_group.items():
        if _share_that_meets(ranks, found) < _MEET:
            problems.append(f"{group}: collectives that should be the same do not overlap in time")
        else:
            meetings += found
    offsets = clock_offsets(ranks, meetings)
    starts = [rank.start_us - offsets[i] if i in offsets else None for i, rank in enumerate(ranks)]
    first = starts[0] if len(ranks) == 1 or any(start is not None for start in starts[1:]) else None
    shifts = [None if start is None or first is None else start - first for start in starts]
    return Comparison(ranks, meetings, shifts, problems)


def clock_offsets(ranks: Sequence[RankTransfers], meetings: Sequence[Meeting], root: int = 0) -> dict[int, float]:
    """How far each rank's clock is ahead of that of `root`, for all ranks that anything connects to it.

    Ranks on one host share a clock. Between hosts, the ends of the same collectives tell: their median.
    """
    hosts: dict[str, dict[int, float]] = defaultdict(dict)
    for position, rank in enumerate(ranks):
        hosts[rank.host or str(position)][position] = -rank.base_us
    ends: dict[tuple[int, ...], list[list[float]]] = defaultdict(list)
    for meeting in meetings:
        ends[meeting.members].append([event.end for event in meeting.events])
    links: list[Mapping[int, float]] = [*hosts.values()]
    for members, ends_nM in ends.items():
        apart_nM = np.array(ends_nM) - np.array(ends_nM)[:, :1]
        links.append(dict(zip(members, np.median(apart_nM, axis=0).tolist(), strict=True)))
    known, before = {root: 0.0}, 0
    while len(known) > before:
        before = len(known)
        for link in links:
            if (shared := next((member for member in link if member in known), None)) is not None:
                own = known[shared] - link[shared]
                known = {member: own + offset for member, offset in link.items()} | known
    return known


def _share_that_meets(ranks: Sequence[RankTransfers], meetings: Sequence[Meeting]) -> float:
    """The share of the meetings of one group in which there is a moment when all ranks are inside."""
    offsets, met = clock_offsets(ranks, meetings, meetings[0].members[0]), 0
    for meeting in meetings:
        own = [(event, offsets.get(member, 0.0)) for member, event in zip(meeting.members, meeting.events, strict=True)]
        met += max(event.start - offset for event, offset in own) <= min(event.end - offset for event, offset in own)
    return met / len(meetings)


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
