"""Find the same collective in the traces of several ranks.

A collective belongs to a process group, so it is compared only among the ranks of that group: with tensor and data
parallelism, each rank meets other ranks in each group. In a group, collectives with the same kind and sequence number
are one meeting. Without sequence numbers, the k-th collective of one rank is the k-th of the others, as long as their
kinds agree; a remark says where they do not. A send and a receive between the same two ranks
also meet, the k-th with the k-th: PyTorch numbers them on each rank by itself, over all peers (`seqP2P_` in
ProcessGroupNCCL.cpp).

Transfers without a recorded group are compared among all ranks, by the names of their kernels.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import NamedTuple

from ...messages import list_ranks, plural
from .collectives import group_name, kind_of_collective
from .trace import DeviceEvent

_POINT_TO_POINT = re.compile(r":(send|recv)|gloo:broadcast")  # NCCL's kernel names do not distinguish the first two
"""Transfers that do not meet: gloo's broadcast is sends, and the root does not wait for the others."""


@dataclass(frozen=True, slots=True)
class RankTransfers:
    """The transfers of one rank, in microseconds."""

    transfers: Sequence[DeviceEvent]
    start_us: float
    """Start of its first event."""
    base_us: float = 0.0
    """The origin of its times."""
    host: str = ""
    """Name of the host; ranks on the same host share a clock. "" if unknown."""
    rank: int | None = None
    world_size: int | None = None


class Meeting(NamedTuple):
    """One collective on the ranks that recorded it."""

    group: "Group"
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
        """The member that joined last, which is the one with the shortest duration."""
        return min(zip(self.members, self.events, strict=True), key=lambda pair: pair[1].end - pair[1].start)[0]


class Group(NamedTuple):
    """A process group as the traces describe it. Without ranks, the size distinguishes groups of one name."""

    name: str = ""
    label: str = ""
    """How reports call it."""
    ranks: tuple[int, ...] = ()
    size: int | None = None
    peers: tuple[int, int] | None = None
    """Source and destination of point-to-point transfers."""

    def __str__(self) -> str:
        if self.peers:
            return f"{self.peers[0]} -> {self.peers[1]}"
        of = f" of {list_ranks(self.ranks)}" if 0 < len(self.ranks) <= 8 else ""
        return f"{self.label or 'transfers without a recorded group'}{of}"


def match_collectives(ranks: Sequence[RankTransfers]) -> tuple[dict["Group", list[Meeting]], list[str]]:
    """Return the meetings of at least two ranks, by group and in the order of the first member.

    The second result says why other groups have none.
    """
    recorded: dict[Group, dict[int, list[DeviceEvent]]] = defaultdict(dict)
    for position, rank in enumerate(ranks):
        for event in sorted(rank.transfers, key=lambda event: event.start):
            if (group := _group_of(event, rank)) is not None:
                recorded[group].setdefault(position, []).append(event)
    by_group: dict[Group, list[Meeting]] = {}
    problems: list[str] = []
    for group, members in recorded.items():
        if group == Group() and len(members) < len(ranks) and len(members) > 1:
            without = [i for i in range(len(ranks)) if i not in members]
            problems.append(f"transfers without a recorded group: {_names(ranks, without)} recorded none")
        elif group.size is not None and len(members) > group.size:
            problems.append(f"{group}: {len(members)} ranks recorded this group of {plural(group.size, 'rank')}")
        elif len(members) > 1:
            keyed = _numbered(group, members) or _in_order(group, members, ranks, problems)
            if found := _by_key(group, keyed):
                by_group[group] = found
    return by_group, problems


def _group_of(event: DeviceEvent, rank: RankTransfers) -> Group | None:
    """The group of a transfer; None for a transfer that cannot be compared."""
    found = event.collective
    if found is None:
        return None if _POINT_TO_POINT.search(event.name) else Group()
    kind = kind_of_collective(event)
    if kind in ("send", "recv"):
        # PyTorch records the global rank of the peer (saveNcclMeta in torch/csrc/profiler/util.cpp)
        if found.peer is None or rank.rank is None:
            return None
        peers = (rank.rank, found.peer) if kind == "send" else (found.peer, rank.rank)
        return Group(found.group, group_name(found), found.ranks, peers=peers)
    return Group(found.group, group_name(found), found.ranks, None if found.ranks else found.size or None)


Keyed = Mapping[int, Mapping[object, DeviceEvent]]
"""The events of each member. Equal keys are the same collective."""


def _numbered(group: Group, members: Mapping[int, Sequence[DeviceEvent]]) -> Keyed | None:
    """By sequence number and kind; several with the same ones (in a coalesced call) are counted. None: unknown."""
    times: Counter[object] = Counter()
    keyed: dict[int, dict[object, DeviceEvent]] = defaultdict(dict)
    for member, events in members.items():
        for event in events:
            if group.peers or event.collective is None or event.collective.sequence is None:
                return None
            key = event.collective.sequence, _kind(group, event)
            keyed[member][*key, times[member, key]] = event
            times[member, key] += 1
    return keyed


def _in_order(
    group: Group, members: Mapping[int, Sequence[DeviceEvent]], ranks: Sequence[RankTransfers], problems: list[str]
) -> Keyed:
    """By their order, as long as the kinds agree. Appends a sentence to `problems` where they do not."""
    first = max(members, key=lambda member: len(members[member]))
    keyed: dict[int, dict[object, DeviceEvent]] = {}
    problem = ""
    for member, events in members.items():
        pairs = zip(members[first], events, strict=False)
        alike = [*takewhile(lambda pair: _kind(group, pair[0]) == _kind(group, pair[1]), pairs)]
        keyed[member] = {k: event for k, (_, event) in enumerate(alike)}
        if len(alike) < len(members[first]):
            names = " and ".join(_names(ranks, [one]) for one in sorted((first, member)))
            in_order = f" ({len(alike):,} of them are compared in their order)" if alike else ""
            problem = f"{group}: {names} recorded different collectives, without numbers{in_order}"
    problems += [problem] if problem else []
    return keyed


def _kind(group: Group, event: DeviceEvent) -> str:
    """What must be the same on all members."""
    if group.peers:
        return ""  # a send meets a receive
    return (kind_of_collective(event) or (event.collective.name if event.collective else "")) or event.name


def _by_key(group: Group, keyed: Keyed) -> list[Meeting]:
    joined: dict[object, dict[int, DeviceEvent]] = defaultdict(dict)
    for member, recorded in keyed.items():
        for key, event in recorded.items():
            joined[key][member] = event
    return [Meeting(group, tuple(same), tuple(same.values())) for same in joined.values() if len(same) > 1]


def _names(ranks: Sequence[RankTransfers], positions: Iterable[int]) -> str:
    numbers = [ranks[position].rank for position in positions]
    if None in numbers:
        return f"trace{'s' * (len(numbers) > 1)} {', '.join(map(str, positions))}"
    return list_ranks([number for number in numbers if number is not None])
