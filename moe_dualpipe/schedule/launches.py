"""Check that the order of launches cannot make a run hang.

A transfer or collective runs when all ranks of its group have launched it, and the launches of a group run one after
the other. So a run hangs if two ranks of a group launch in different orders, or if ranks wait for each other in a
cycle. This module finds both from the launches and waits of all ranks. It assumes nothing about durations.

A launch does not block. A wait blocks everything that follows it on its rank. A real GPU blocks less: the host
continues, and only work on the same stream waits.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from ..messages import list_ranks
from .grid import ScheduleError


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks whose launches run one after the other: those of a collective, or the two ends of a link."""

    name: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} of {list_ranks(self.ranks)}"


@dataclass(frozen=True, slots=True)
class CommLaunch:
    """A transfer or collective. what: its description, equal on all ranks of the group."""

    group: Group
    what: str


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait for an earlier launch of the same rank: its index in the rank's program."""

    launch: int


Program = tuple[CommLaunch | Wait, ...]
"""What one rank launches and waits for, in order."""

_AROUND = 3  # launches shown before and after a difference


def check_launches(name: str, programs: Sequence[Program]) -> dict[Group, int]:
    """Return the number of launches of each group. Raises ScheduleError if a rank may wait forever.

    programs: one per rank. name: what ran, for the error.
    """
    orders: defaultdict[Group, defaultdict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rank, program in enumerate(programs):
        for step in program:
            if isinstance(step, CommLaunch):
                orders[step.group][rank].append(step.what)
    for group, by_rank in orders.items():
        if strangers := sorted({*by_rank} - {*group.ranks}):
            raise ScheduleError(f"{name}: rank {strangers[0]} launches in the group {group}, which it is not in")
        first, *others = group.ranks
        for other in others:
            if by_rank[first] != by_rank[other]:
                difference = _side_by_side((first, other), (by_rank[first], by_rank[other]))
                raise ScheduleError(f"{name}: in the group {group}, the orders of launches differ\n{difference}")
    if stuck := _run(programs):
        raise ScheduleError(f"{name}: ranks wait for each other\n{_cycle(stuck)}")
    return {group: len(by_rank[group.ranks[0]]) for group, by_rank in orders.items()}


def _side_by_side(ranks: tuple[int, int], orders: tuple[list[str], list[str]]) -> str:
    """The lines of two orders around their first difference, which is marked with >."""
    pairs = [*zip_longest(*orders, fillvalue="-")]
    at = next(i for i, (left, right) in enumerate(pairs) if left != right)
    shown = range(max(0, at - _AROUND), min(len(pairs), at + _AROUND + 1))
    rows = [("launch", *(f"rank {rank}" for rank in ranks))]
    rows += [(f"{'>' if i == at else ' '} {i}", *pairs[i]) for i in shown]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _run(programs: Sequence[Program]) -> dict[int, tuple[CommLaunch, int]]:
    """Run all ranks until each ends or waits forever. Returns, for each rank that waits, the launch and who is missing.

    The launches of a group must have the same order on all its ranks.
    """
    numbers: list[dict[int, int]] = []  # for each rank: index of a launch in the program -> its number in its group
    for program in programs:
        counts: defaultdict[Group, int] = defaultdict(int)
        numbers.append({})
        for i, step in enumerate(program):
            if isinstance(step, CommLaunch):
                numbers[-1][i] = counts[step.group]
                counts[step.group] += 1
    launched: defaultdict[tuple[Group, int], int] = defaultdict(int)
    done = [0] * len(programs)

    def missing(rank: int, index: int) -> tuple[CommLaunch, int] | None:
        """The launch, and a rank of its group that has not launched it; None if it can run."""
        launch = programs[rank][index]
        assert isinstance(launch, CommLaunch)
        late = [r for r in launch.group.ranks if launched[launch.group, r] <= numbers[rank][index]]
        return (launch, late[0]) if late else None

    moved = True
    while moved:
        moved, stuck = False, {}
        for rank, program in enumerate(programs):
            while done[rank] < len(program):
                step = program[done[rank]]
                if isinstance(step, CommLaunch):
                    launched[step.group, rank] += 1
                elif found := missing(rank, step.launch):
                    stuck[rank] = found
                    break
                done[rank] += 1
                moved = True
    return stuck


def _cycle(stuck: dict[int, tuple[CommLaunch, int]]) -> str:
    """Who waits for whom, from one rank until a rank repeats."""
    rank, seen = min(stuck), list[int]()
    while rank not in seen and rank in stuck:
        seen.append(rank)
        rank = stuck[rank][1]
    waits = [(r, *stuck[r]) for r in (seen[seen.index(rank) :] if rank in seen else seen)]
    return "\n".join(
        f"rank {r} waits for {what.what} ({what.group}): rank {of} must launch it" for r, what, of in waits
    )
