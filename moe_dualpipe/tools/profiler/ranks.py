"""Compare the traces of several ranks: how long each waited for the others, and the offsets between their clocks.

A collective ends on all ranks at the same moment, after the last rank has joined. So it is shortest on the last rank to
join; on other ranks, the extra time is waiting time. This needs no common clock. The ends give the offsets between the
clocks. Which collectives are the same is found in matching.py, by process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...messages import list_ranks, plural
from .clocks import Clock, common_clock
from .matching import Group, Meeting, RankTransfers, match_collectives

_MEET = 0.9


@dataclass(frozen=True, slots=True)
class RankSkew:
    """One rank compared with the others, in microseconds. None: unknown."""

    waited_us: float | None
    """Total time by which its collectives were longer than those of the last rank to join."""
    shift_us: float | None
    """Start of its first event minus the start of rank 0's first event, on the clock of rank 0."""


@dataclass(frozen=True)
class Comparison:
    """What several ranks have in common."""

    ranks: Sequence[RankTransfers]
    meetings: Sequence[Meeting]
    """The same collectives on several ranks."""
    clocks: Sequence[Clock]
    problems: Sequence[str]
    """Groups whose collectives could not be compared, each with the reason."""

    @property
    def skews(self) -> tuple[RankSkew, ...]:
        """The skew of each rank."""
        waited: dict[int, float] = {}
        for meeting in self.meetings:
            for member, time in zip(meeting.members, meeting.waited_us, strict=True):
                waited[member] = waited.get(member, 0.0) + time
        shifts = [None if clock.root else clock.shift_us for clock in self.clocks]
        if len(shifts) > 1 and all(shift is None for shift in shifts[1:]):
            shifts[0] = None  # there is nothing to compare it with
        return tuple(RankSkew(waited.get(i), shift) for i, shift in enumerate(shifts))

    @property
    def missing(self) -> list[int]:
        """The ranks of the job without a trace; empty if its size is unknown."""
        size = max((rank.world_size or 0 for rank in self.ranks), default=0)
        return sorted({*range(size)} - {rank.rank for rank in self.ranks if rank.rank is not None})

    @property
    def sentences(self) -> list[str]:
        """What could not be compared, and why."""
        missing = self.missing_text if len(self.ranks) > 1 else ""
        return [*(f"Not compared: {problem}." for problem in self.problems), *([missing] if missing else [])]

    @property
    def missing_text(self) -> str:
        """A sentence about ranks without a trace, or ""."""
        missing = self.missing
        if not missing:
            return ""
        shown = f" ({list_ranks(missing)})" if len(missing) <= 8 else ""
        size = max(rank.world_size or 0 for rank in self.ranks)
        return (
            f"{len(missing):,} of {plural(size, 'rank')} have no trace here{shown}: "
            "waits for them count as communication."
        )

    @cached_property
    def joined(self) -> list[dict[int, Meeting]]:
        """The meetings of each rank, by the position of its event in its `transfers`."""
        found: list[dict[int, Meeting]] = [{} for _ in self.ranks]
        for meeting in self.meetings:
            for member, index in zip(meeting.members, meeting.indices, strict=True):
                found[member][index] = meeting
        return found


def compare_traces(ranks: Sequence[RankTransfers]) -> Comparison:
    """Compare the ranks by process group.

    Groups are left out if in more than 1 of 10 meetings there is no moment when all ranks are inside. Clocks are not
    exact enough to require this of all meetings.
    """
    matches = match_collectives(ranks)
    problems = [*matches.problems]
    groups = dict(matches.by_group)
    while True:
        meetings = [meeting for found in groups.values() for meeting in found]
        clocks = common_clock(ranks, meetings)
        apart = _worst(ranks, groups, clocks)
        if apart is None:
            return Comparison(ranks, meetings, clocks, problems)
        del groups[apart]
        problems.append(f"{apart}: collectives that should be the same do not overlap in time")


def _worst(
    ranks: Sequence[RankTransfers], groups: Mapping[Group, Sequence[Meeting]], clocks: Sequence[Clock]
) -> Group | None:
    """The group with the smallest share of meetings at which all ranks are inside, if that is too small."""
    shares = {group: _share_that_meets(ranks, meetings, clocks) for group, meetings in groups.items()}
    group = min(shares, key=lambda group: shares[group], default=None)
    return group if group is not None and shares[group] < _MEET else None


def _share_that_meets(ranks: Sequence[RankTransfers], meetings: Sequence[Meeting], clocks: Sequence[Clock]) -> float:
    """The members of a meeting always have a common clock: the meeting itself connects them."""
    met = 0
    for meeting in meetings:
        own = [(clocks[member], ranks[member].start_us) for member in meeting.members]
        starts = [clock.at(e.start - zero) for (clock, zero), e in zip(own, meeting.events, strict=True)]
        ends = [clock.at(e.end - zero) for (clock, zero), e in zip(own, meeting.events, strict=True)]
        met += max(starts) <= min(ends)
    return met / len(meetings)
