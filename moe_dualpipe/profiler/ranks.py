"""Compare the traces of several ranks: how long each waited for the others, and the offsets between their clocks.

A collective ends on all ranks at the same moment, after the last rank has joined. So it is shortest on the last rank to
join; on other ranks, the extra time is waiting time. This needs no common clock. The ends give the offsets between the
clocks. Which collectives are the same is found in meetings.py, by process group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..messages import list_ranks
from .clocks import Clock, common_clock
from .meetings import Group, Meeting, RankTransfers, match_collectives
from .trace import DeviceEvent

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
    clocks: Sequence[Clock | None]
    problems: Sequence[str]
    """Groups whose collectives could not be compared, each with the reason."""

    @property
    def skews(self) -> tuple[RankSkew, ...]:
        """The skew of each rank."""
        waited: dict[int, float] = {}
        for meeting in self.meetings:
            for member, time in zip(meeting.members, meeting.waited_us, strict=True):
                waited[member] = waited.get(member, 0.0) + time
        shifts = [None if clock is None else clock.shift_us for clock in self.clocks]
        if len(shifts) > 1 and all(shift is None for shift in shifts[1:]):
            shifts[0] = None  # there is nothing to compare it with
        return tuple(RankSkew(waited.get(i), shift) for i, shift in enumerate(shifts))

    @property
    def missing(self) -> list[int]:
        """The ranks of the job without a trace; empty if its size is unknown."""
        size = max((rank.world_size or 0 for rank in self.ranks), default=0)
        return sorted({*range(size)} - {rank.rank for rank in self.ranks if rank.rank is not None})

    def transfer_us(self, position: int) -> dict[DeviceEvent, float]:
        """The duration of each compared transfer of one rank on the last rank to join it."""
        return {
            meeting.events[meeting.members.index(position)]: meeting.shortest_us
            for meeting in self.meetings
            if position in meeting.members
        }


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
        problems.append(f"{apart}: its collectives do not overlap in time")


def rank_skews(ranks: Sequence[RankTransfers]) -> tuple[RankSkew, ...]:
    """Return the skew of each rank."""
    return compare_traces(ranks).skews


def _worst(
    ranks: Sequence[RankTransfers], groups: Mapping[Group, Sequence[Meeting]], clocks: Sequence[Clock | None]
) -> Group | None:
    """The group with the smallest share of meetings at which all ranks are inside, if that is too small."""
    shares = {group: _share_that_meets(ranks, meetings, clocks) for group, meetings in groups.items()}
    group = min(shares, key=lambda group: shares[group], default=None)
    return group if group is not None and shares[group] < _MEET else None


def _share_that_meets(
    ranks: Sequence[RankTransfers], meetings: Sequence[Meeting], clocks: Sequence[Clock | None]
) -> float:
    met = 0
    for meeting in meetings:
        starts, ends = [], []
        for member, event in zip(meeting.members, meeting.events, strict=True):
            if (clock := clocks[member]) is not None:
                starts.append(clock.at(event.start - ranks[member].start_us))
                ends.append(clock.at(event.end - ranks[member].start_us))
        met += max(starts, default=0.0) <= min(ends, default=0.0)
    return met / len(meetings)


def missing_text(comparison: Comparison) -> str:
    """Say which ranks have no trace, or ""."""
    missing = comparison.missing
    if not missing:
        return ""
    shown = list_ranks(missing) if len(missing) <= 8 else f"{len(missing):,} ranks"
    return f"{shown} of {max(rank.world_size or 0 for rank in comparison.ranks):,} have no trace here"
