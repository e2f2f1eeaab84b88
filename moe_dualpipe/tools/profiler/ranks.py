"""Compare the traces of several ranks: which collectives are the same, who waited for whom, and the clocks.

A collective ends on all ranks at the same moment, after the last rank has joined. So it is shortest on the last rank to
join; on other ranks, the extra time is waiting time. This needs no common clock. The ends give the offsets between the
clocks of different hosts.

A collective is compared only among the ranks of its process group: with tensor and data parallelism, a rank belongs to
several groups. Within a group, collectives with the same kind and sequence number are one meeting. Without sequence
numbers, the k-th collective of a kind on one rank is the k-th on the others; a sentence says if these do not overlap in
time. A send meets the receive of its peer in the same way, the k-th the k-th: PyTorch numbers sends and receives on
each rank separately, over all peers (`seqP2P_` in ProcessGroupNCCL.cpp).

Transfers without a recorded group are compared among all ranks, by the names of their kernels.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from ...messages import list_ranks, plural
from .account import WAITING, Entry
from .communication import kind_of_collective
from .trace import DeviceEvent, Trace

_POINT_TO_POINT = re.compile(r":(send|recv)|gloo:broadcast|shared:")  # NCCL's kernels do not distinguish the first two
"""Transfers that are not compared. A broadcast of gloo consists of sends, and its root does not wait."""
_LEAST_OVERLAP = 0.9
"""Minimum share of a group's meetings in which all ranks are inside at one moment. Clocks are not exact."""


class RecordedGroup(NamedTuple):
    """A process group as the traces describe it. Without ranks, the size distinguishes groups of one name."""

    name: str = ""
    label: str = ""
    """Its name in reports."""
    ranks: tuple[int, ...] = ()
    size: int | None = None
    peers: tuple[int, int] | None = None
    """Source and destination of sends and receives."""

    def __str__(self) -> str:
        if self.peers:
            return f"{self.peers[0]} -> {self.peers[1]}"
        of = f" of {list_ranks(self.ranks)}" if 0 < len(self.ranks) <= 8 else ""
        return f"{self.label or 'transfers without a recorded group'}{of}"


class Meeting(NamedTuple):
    """One collective on the ranks that recorded it."""

    group: RecordedGroup
    members: tuple[int, ...]
    """Positions in the list of ranks."""
    events: tuple[DeviceEvent, ...]
    """The event of each member."""

    @property
    def shortest_us(self) -> float:
        """The duration on the last member to join: the time of the transfer itself."""
        return min(event.end - event.start for event in self.events)

    @property
    def last(self) -> int:
        """The member that joined last: the one with the shortest duration."""
        return min(zip(self.members, self.events, strict=True), key=lambda pair: pair[1].end - pair[1].start)[0]


@dataclass(frozen=True)
class RankComparison:
    """The common collectives of several ranks, and their clock."""

    meetings: Sequence[Meeting]
    shifts_us: Sequence[float | None]
    """Start of each rank's first event minus the start of rank 0's first event, on one clock. None: unknown."""
    sentences: Sequence[str]
    """Which groups could not be compared, and why, and which ranks have no trace."""


def compare_traces(ranks: Sequence[Trace]) -> RankComparison:
    """Compare the ranks by process group. Their traces come from `as_device`."""
    recorded: dict[RecordedGroup, dict[int, list[DeviceEvent]]] = defaultdict(dict)
    for position, rank in enumerate(ranks):
        for event in sorted(rank.device_events, key=lambda event: event.start):
            if event.kind == "comm" and (group := _group_of(event, rank)) is not None:
                recorded[group].setdefault(position, []).append(event)
    meetings, problems = list[Meeting](), list[str]()
    for group, members in recorded.items():
        found = _meetings_of(group, members, len(ranks), problems) if len(members) > 1 else []
        if found and _share_that_overlaps(ranks, found) < _LEAST_OVERLAP:
            problems.append(f"{group}: collectives that should be the same do not overlap in time")
        else:
            meetings += found
    offsets = clock_offsets(ranks, meetings)
    starts = [rank.start_us - offsets[i] if i in offsets else None for i, rank in enumerate(ranks)]
    first = starts[0] if len(ranks) == 1 or any(start is not None for start in starts[1:]) else None
    shifts = [None if start is None or first is None else start - first for start in starts]
    return RankComparison(meetings, shifts, [*(f"Not compared: {text}." for text in problems), *_missing(ranks)])


def _missing(ranks: Sequence[Trace]) -> Iterator[str]:
    """A sentence if some of several ranks have no trace."""
    size = max((rank.world_size or 0 for rank in ranks), default=0)
    missing = sorted({*range(size)} - {rank.rank for rank in ranks if rank.rank is not None})
    if missing and len(ranks) > 1:
        shown = f" ({list_ranks(missing)})" if len(missing) <= 8 else ""
        of = f"{len(missing):,} of {plural(size, 'rank')}"
        yield f"{of} have no trace here{shown}: waits for them count as communication."


def _group_of(event: DeviceEvent, rank: Trace) -> RecordedGroup | None:
    """The group of a transfer; None for a transfer that cannot be compared."""
    found = event.collective
    if found is None:
        return None if _POINT_TO_POINT.search(event.name) else RecordedGroup()
    kind = kind_of_collective(event)
    if kind not in ("send", "recv"):
        return RecordedGroup(found.group, found.group_name, found.ranks, None if found.ranks else found.size or None)
    # PyTorch records the global rank of the peer (saveNcclMeta in torch/csrc/profiler/util.cpp)
    if found.peer is None or rank.rank is None:
        return None
    peers = (rank.rank, found.peer) if kind == "send" else (found.peer, rank.rank)
    return RecordedGroup(found.group, found.group_name, found.ranks, peers=peers)


Members = Mapping[int, Sequence[DeviceEvent]]
"""The transfers of each rank of one group, by its position in the list of ranks."""


def _meetings_of(group: RecordedGroup, members: Members, num_ranks: int, problems: list[str]) -> list[Meeting]:
    """The meetings of one group, in the order of its first rank. Appends to `problems` why others are missing."""
    if group == RecordedGroup() and len(members) < num_ranks:
        problems.append(f"{group}: only {len(members)} of {plural(num_ranks, 'rank')} recorded any")
        return []
    if group.size is not None and len(members) > group.size:
        problems.append(f"{group}: {len(members)} ranks recorded this group of {plural(group.size, 'rank')}")
        return []
    joined: dict[object, dict[int, DeviceEvent]] = defaultdict(dict)
    for member, events in members.items():
        for key, event in zip(_keys(group, events), events, strict=True):
            joined[key][member] = event
    counts = [len(events) for events in members.values()]
    numbered = all(event.collective and event.collective.sequence is not None for event in chain(*members.values()))
    if min(counts) < max(counts) and (group.peers or not numbered):
        first = f"the first {min(counts):,} of each are compared in their order"
        problems.append(f"{group}: some ranks recorded more collectives than others, without numbers ({first})")
    return [Meeting(group, tuple(same), tuple(same.values())) for same in joined.values() if len(same) > 1]


def _keys(group: RecordedGroup, events: Sequence[DeviceEvent]) -> Iterator[object]:
    """Yield a key for each transfer of one rank; equal keys are the same collective.

    It is the sequence number, if there is one, and the kind. Several with the same ones are counted: those of a
    coalesced call, and all without numbers. A send meets a receive, and each of them has numbers of its own.
    """
    times: Counter[object] = Counter()
    for event in events:
        recorded = event.collective
        kind = kind_of_collective(event) or (recorded.name if recorded else "") or event.name
        key = ("", None) if group.peers else (kind, recorded.sequence if recorded else None)
        yield *key, times[key]
        times[key] += 1


def clock_offsets(ranks: Sequence[Trace], meetings: Sequence[Meeting], root: int = 0) -> dict[int, float]:
    """How far each rank's clock is ahead of that of `root`, for all ranks that are connected to it.

    Ranks on one host share a clock. Between hosts, the offset is the median difference between the ends of the same
    collectives.
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


def _share_that_overlaps(ranks: Sequence[Trace], meetings: Sequence[Meeting]) -> float:
    """The share of the meetings of one group in which all ranks are inside at one moment."""
    offsets, met = clock_offsets(ranks, meetings, meetings[0].members[0]), 0
    for meeting in meetings:
        own = [(event, offsets.get(member, 0.0)) for member, event in zip(meeting.members, meeting.events, strict=True)]
        met += max(event.start - offset for event, offset in own) <= min(event.end - offset for event, offset in own)
    return met / len(meetings)


def waits_for_ranks(comparison: RankComparison, names: Sequence[str]) -> list[list[Entry]]:
    """For each rank, the times in which a collective waited for the last rank to join, sorted. names: of the ranks."""
    waits: list[list[Entry]] = [[] for _ in names]
    for meeting in comparison.meetings:
        for member, event in zip(meeting.members, meeting.events, strict=True):
            if member != meeting.last:
                waits[member].append(Entry(event.start, event.end - meeting.shortest_us, WAITING, names[meeting.last]))
    return [sorted(own, key=lambda wait: wait.start_us) for own in waits]
