"""When ranks wait for too long, one of them prints who waits for whom (waits.py), once.

One rank claims a key of the store, and reads the heartbeats of all ranks. The claim holds until its owner moves on. So
each stall is reported once, by one rank. All ranks answer: for one that does not, the run ends sooner (watch.py).
"""

from collections.abc import Callable, Mapping

import torch.distributed as dist

from .heartbeat import Heartbeat
from .program import program_name
from .report import print_now
from .waits import describe_waits

_REPORT = "report"


class StallReport:
    """Reports a stall of this rank after `patience` checks. All times are numbers of checks.

    read: returns the last heartbeat of a rank, or None.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, patience: float, read: Callable[[int], Heartbeat | None]
    ):
        self._store, self.rank, self.size, self.patience, self._read = store, rank, size, patience, read
        self._printed, self._due = "", 0.0

    def check(self, own: Heartbeat) -> None:
        """Call at each check with this rank's heartbeat."""
        claim = f"{self.rank} {own.since}"
        if own.count - own.since < self.patience or own.count < self._due or self._printed == claim:
            return
        if self._claim(claim):
            self._due = own.count + self.patience / 2  # if nobody waits, look again at that time
            if lines := describe_stall({rank: self._read(rank) for rank in range(self.size)}):
                self._printed = claim
                print_now("".join(f"{program_name()}: {line}\n" for line in lines))

    def _claim(self, claim: str) -> bool:
        """Claim the report. Returns False if another rank holds the claim and still waits."""
        held = self._store.get(_REPORT).decode() if self._store.check([_REPORT]) else ""
        if held:
            rank, since = map(int, held.split())
            if rank != self.rank and (beat := self._read(rank)) is not None and beat.since == since:
                return False
        return self._store.compare_set(_REPORT, held, claim).decode() == claim


def describe_stall(beats: Mapping[int, Heartbeat | None]) -> list[str]:
    """Who waits for whom. beats: the last heartbeat of each rank, or None."""
    states = {rank: beat.state for rank, beat in beats.items() if beat is not None}
    gone = {rank: "no sign of life" for rank in beats if rank not in states}
    ended = {rank: f"has ended in {beat.state.position}" for rank, beat in beats.items() if beat and beat.ended}
    return describe_waits(states, gone | ended)
