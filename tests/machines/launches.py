"""Check that the order of launches cannot make a run hang.

A transfer or collective runs when all ranks of its group have launched it, and the launches of a group run one after
the other. So a run hangs if two ranks of a group launch in different orders, or if ranks wait for each other in a
cycle. This module finds both from the launches and waits of all ranks. It assumes nothing about durations.

A launch does not block. A wait blocks everything that follows it on its rank. A real GPU blocks less: the host
continues, and only work on the same stream waits.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple


class Lane(NamedTuple):
    """Ranks whose launches run one after the other: those of a collective, or the two ends of a link."""

    name: str
    ranks: tuple[int, ...]


class Launch(NamedTuple):
    """A transfer or collective. what: its description, equal on all ranks of the lane."""

    lane: Lane
    what: str


class Wait(NamedTuple):
    """A wait for an earlier launch of the same rank: its index in the rank's program."""

    launch: int


Program = list[Launch | Wait]
"""What one rank launches and waits for, in order."""


class HangError(AssertionError):
    """A rank may wait forever."""


def check_launches(programs: Sequence[Program]) -> dict[Lane, int]:
    """Return the number of launches of each lane. Raises HangError if a rank may wait forever."""
    orders: dict[Lane, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for rank, program in enumerate(programs):
        for step in program:
            if isinstance(step, Launch):
                orders[step.lane][rank].append(step.what)
    for lane, by_rank in orders.items():
        assert {*by_rank} == {*lane.ranks}, f"ranks {[*by_rank]} launch in {lane}"
        for rank in lane.ranks[1:]:
            for mine, theirs in zip_longest(by_rank[lane.ranks[0]], by_rank[rank], fillvalue="nothing"):
                if mine != theirs:
                    raise HangError(f"{lane}: rank {lane.ranks[0]} launches {mine}; rank {rank}: {theirs}")
    _run(programs)
    return {lane: len(by_rank[lane.ranks[0]]) for lane, by_rank in orders.items()}


def _run(programs: Sequence[Program]) -> None:
    """Run all ranks to their ends. Raises HangError, with all waits that do not end. All orders must be equal."""
    numbers: list[dict[int, int]] = []  # for each rank: index of a launch in the program -> its number in its lane
    for program in programs:
        counts = Counter[Lane]()
        numbers.append({})
        for i, step in enumerate(program):
            if isinstance(step, Launch):
                numbers[-1][i] = counts[step.lane]
                counts[step.lane] += 1
    launched = Counter[tuple[Lane, int]]()
    done = [0] * len(programs)
    moved = True
    while moved:
        moved, stuck = False, []
        for rank, program in enumerate(programs):
            while done[rank] < len(program):
                step = program[done[rank]]
                if isinstance(step, Launch):
                    launched[step.lane, rank] += 1
                else:
                    awaited, number = program[step.launch], numbers[rank][step.launch]
                    assert isinstance(awaited, Launch)
                    if late := [r for r in awaited.lane.ranks if launched[awaited.lane, r] <= number]:
                        stuck.append(f"rank {rank} waits for {awaited.what}: rank {late[0]} must launch it")
                        break
                done[rank] += 1
                moved = True
    if stuck:
        raise HangError("\n".join(["ranks wait for each other", *stuck]))
