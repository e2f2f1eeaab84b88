"""Find out who waits for whom, from the heartbeats of all ranks.

In a point-to-point transfer, a rank waits for the rank at the other end. In a collective, it waits for every rank of
the group that has not reached the collective. All ranks go through the same parts of the run in the same order, so a
rank with a lower `order` has not reached it.
"""

from collections.abc import Mapping

from ..messages import list_ranks
from .heartbeat import Heartbeat

Wait = tuple[tuple[int, ...], tuple[int, ...]]
"""The ranks that a rank waits for; if there are none, the ranks that went on without this transfer."""


def find_wait(rank: int, beats: Mapping[int, Heartbeat], others: set[int]) -> Wait | None:
    """The wait of one rank; None if it is busy. beats: of the running ranks. others: ranks that do not run any more."""
    own = beats[rank]
    if not own.transfer:
        return None
    if own.peer is not None:
        return (own.peer,), ()
    members = [other for other in (own.group or sorted({*beats, *others})) if other != rank]
    depth = 2 if own.group else 1
    orders = {other: beats[other].order[:depth] for other in members if other not in others}
    here = own.order[:depth]
    if missing := [other for other in members if other in others or orders[other] < here]:
        return tuple(missing), ()
    if not own.waiting:
        return None
    busy = tuple(other for other in members if orders[other] == here and not beats[other].waiting)
    return busy, tuple(other for other in members if not busy and orders[other] > here)


def describe_waits(beats: Mapping[int, Heartbeat | None]) -> list[str]:
    """One line for all ranks that wait for the same thing, then one for each other rank that these lines name.

    beats: the last heartbeat of each rank; None if it does not answer.
    """
    running = {rank: beat for rank, beat in beats.items() if beat is not None and not beat.ended}
    found = {rank: find_wait(rank, running, beats.keys() - running) for rank in sorted(running)}
    waits = {rank: wait for rank, wait in found.items() if wait is not None}
    alike: dict[tuple[str, Wait], list[int]] = {}
    for rank, wait in waits.items():
        alike.setdefault((running[rank].transfer, wait), []).append(rank)
    lines = []
    for (transfer, (awaited, passed)), ranks in alike.items():
        who = f"{list_ranks(ranks)} wait{'s' * (len(ranks) == 1)}"
        during = f"{transfer} (for {max(running[rank].seconds for rank in ranks):.0f} s)"
        if awaited:
            lines.append(f"{who} for {list_ranks(awaited)}: {during}")
        else:
            others = f"{list_ranks(passed)} went on without it" if passed else "all its ranks have arrived"
            lines.append(f"{who} in {during}; {others}")
    named = {other for awaited, passed in waits.values() for other in awaited + passed}
    return lines + [f"rank {rank}: {_activity(beats[rank])}" for rank in sorted(named - waits.keys())]


def _activity(beat: Heartbeat | None) -> str:
    if beat is None:
        return "no sign of life"
    return f"has ended in {beat.position}" if beat.ended else f"in {beat.position} for {beat.seconds:.0f} s"
