"""Find out who waits for whom, from the state that each rank reports.

In a point-to-point transfer, a rank waits for the rank at the other end. In a collective, it waits for every rank of
the group that has not reached the collective. All ranks go through the same parts of the run in the same order, so a
rank with a lower `order` has not reached it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..messages import list_ranks


@dataclass(frozen=True, slots=True)
class RankState:
    """What one rank is doing.

    position: the step, the action and the line of code. waiting: whether the main thread is in a call that waits for
    others; always False on CUDA, where this is unknown. seconds: time without a change.
    transfer: text that describes the current transfer or collective; "" if none is known. peer: the rank at its other
    end, if it is point-to-point. group: the ranks that take part in a collective; empty: all.
    order: the number of phases so far, comparable between all ranks, and the number of segments since the last phase
    began, comparable between the ranks of a `group`.
    """

    position: str
    waiting: bool = False
    seconds: float = 0.0
    transfer: str = ""
    peer: int | None = None
    group: tuple[int, ...] = ()
    order: tuple[int, int] = (0, 0)


Wait = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that a rank waits for; if there are none, the ranks that went on without this transfer."""


def find_wait(rank: int, states: Mapping[int, RankState], gone: Mapping[int, str]) -> Wait | None:
    """The wait of one rank; None if it is busy or gone. gone: ranks that have ended or do not answer -> the reason."""
    if rank in gone or not (own := states[rank]).transfer:
        return None
    if own.peer is not None:
        return (own.peer,), ()
    others = [other for other in (own.group or sorted({*states, *gone})) if other != rank]
    depth = 2 if own.group else 1
    here, orders = own.order[:depth], {other: states[other].order[:depth] for other in others if other not in gone}
    if missing := [other for other in others if other in gone or orders[other] < here]:
        return tuple(missing), ()
    if not own.waiting:
        return None
    busy = tuple(other for other in others if orders[other] == here and not states[other].waiting)
    return busy, tuple(other for other in others if not busy and orders[other] > here)


def describe_waits(states: Mapping[int, RankState], gone: Mapping[int, str]) -> list[str]:
    """One line for all ranks that wait for the same thing, then one for each other rank that these lines name."""
    waits = {rank: wait for rank in sorted(states) if (wait := find_wait(rank, states, gone)) is not None}
    alike: dict[tuple[str, Wait], list[int]] = {}
    for rank, wait in waits.items():
        alike.setdefault((states[rank].transfer, wait), []).append(rank)
    lines = []
    for (transfer, (awaited, passed)), ranks in alike.items():
        who = f"{list_ranks(ranks)} wait{'s' * (len(ranks) == 1)}"
        during = f"{transfer} (for {max(states[rank].seconds for rank in ranks):.0f} s)"
        if awaited:
            lines.append(f"{who} for {list_ranks(awaited)}: {during}")
        else:
            others = f"{list_ranks(passed)} went on without it" if passed else "all its ranks have arrived"
            lines.append(f"{who} in {during}; {others}")
    for rank in sorted({other for awaited, passed in waits.values() for other in awaited + passed} - {*waits}):
        lines.append(f"rank {rank}: {gone.get(rank) or f'in {states[rank].position} for {states[rank].seconds:.0f} s'}")
    return lines
