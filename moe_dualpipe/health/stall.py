"""When ranks wait for too long, one of them prints who waits for whom (waits.py), once.

One rank claims a key of the store, and reads the heartbeats of all ranks twice. A rank whose heartbeat has not changed
does not answer. The claim holds until its owner moves on. So each stall is reported once, by one rank.
"""

from collections.abc import Callable

import torch.distributed as dist

from .heartbeat import Heartbeat
from .program import program_name
from .report import print_now
from .waits import describe_waits

_REPORT = "report"


class StallReport:
    """Reports a stall of this rank after `patience` checks. All times are numbers of checks, `interval` seconds apart.

    read: returns the last heartbeat of a rank, or None.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, patience: float, interval: float,
        read: Callable[[int], Heartbeat | None],
    ):  # fmt: skip
        self._store, self.rank, self.size, self.patience = store, rank, size, patience
        self.interval, self._read = interval, read
        self._claimed = self._printed = ""
        self._due = 0.0
        self._first_seen: dict[int, tuple[int, int]] = {}  # the last heartbeat of a rank, and when it was first read

    def check(self, own: Heartbeat) -> None:
        """Call at each check with this rank's heartbeat."""
        claim = f"{self.rank} {own.since}"
        if own.count - own.since < self.patience / 2 or self._printed == claim:
            return
        if self._claimed != claim:
            if self._claim(claim):
                self._claimed, self._due = claim, own.count + self.patience / 2
                self.describe(own.count)
        elif own.count >= self._due:
            self._due = own.count + self.patience / 2  # if nobody waits, look again at that time
            if lines := self.describe(own.count):
                self._printed = claim
                print_now("".join(f"{program_name()}: {line}\n" for line in lines))

    def describe(self, now: int) -> list[str]:
        """Read all heartbeats and return who waits for whom. now: the number of checks so far."""
        states, gone = {}, {}
        for rank in range(self.size):
            if (beat := self._read(rank)) is None:
                gone[rank] = "no sign of life"
                continue
            states[rank] = beat.state
            if self._first_seen.get(rank, (-1, 0))[0] != beat.count:
                self._first_seen[rank] = beat.count, now
            silent = now - self._first_seen[rank][1]
            if beat.ended:
                gone[rank] = f"has ended in {beat.state.position}"
            elif silent > 2 and rank != self.rank:
                gone[rank] = f"no answer for {silent * self.interval:.0f} s (last seen in {beat.state.position})"
        return describe_waits(states, gone)

    def _claim(self, claim: str) -> bool:
        """Claim the report. Returns False if another rank holds the claim and still waits."""
        held = self._store.get(_REPORT).decode() if self._store.check([_REPORT]) else ""
        if held:
            rank, since = map(int, held.split())
            if rank != self.rank and (beat := self._read(rank)) is not None and beat.since == since:
                return False
        return self._store.compare_set(_REPORT, held, claim).decode() == claim
