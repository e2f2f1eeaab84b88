"""Put the times of several ranks on one clock.

Ranks on one host share a clock. Between hosts, the ends of the same collectives give the offset, and the drift where
there are enough of them. Two ranks that share no group are connected through a third one.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from math import inf
from typing import NamedTuple

import numpy as np

from .matching import Meeting, RankTransfers, ends_of

_ENOUGH_FOR_DRIFT = 12
_LARGEST_DRIFT = 1e-3


class Clock(NamedTuple):
    """Maps a rank's time since its first event to the time since the first event of another rank."""

    shift_us: float
    drift: float = 0.0
    root: int = 0
    """Position of that rank. Times of ranks with different roots cannot be compared."""

    def at(self, time_us: float) -> float:
        return time_us * (1 + self.drift) + self.shift_us

    def since(self, time_us: float) -> float:
        """The inverse of `at`."""
        return (time_us - self.shift_us) / (1 + self.drift)


def common_clock(ranks: Sequence[RankTransfers], meetings: Sequence[Meeting]) -> list[Clock]:
    """Return the clock of each rank. Its root is the first rank to which anything connects it.

    Ranks are connected one by one, the best known connection first: the same host, then the most meetings.
    """
    links = _links(ranks, meetings)
    clocks: dict[int, Clock] = {}
    for root in range(len(ranks)):
        if root in clocks:
            continue
        clocks[root] = Clock(0.0, root=root)
        while open_links := [(n, a, b) for (a, b), n in links.items() if a in clocks and b not in clocks]:
            _, one, other = max(open_links, key=lambda link: (link[0], -link[1], -link[2]))
            known, step = clocks[one], _between(ranks[one], ranks[other], ends_of(meetings, one, other))
            clocks[other] = Clock(known.at(step.shift_us), (1 + step.drift) * (1 + known.drift) - 1, root)
    return [clocks[position] for position in range(len(ranks))]


def same_host(one: RankTransfers, other: RankTransfers) -> bool:
    return bool(one.host) and one.host == other.host


def _links(ranks: Sequence[RankTransfers], meetings: Sequence[Meeting]) -> dict[tuple[int, int], float]:
    """The number of meetings of each two ranks, in both orders; infinite on one host."""
    links: Counter[tuple[int, int]] = Counter()
    for members, count in Counter(meeting.members for meeting in meetings).items():
        for one, other in combinations(members, 2):
            links[one, other] += count
            links[other, one] += count
    found: dict[tuple[int, int], float] = dict(links)
    for one, other in combinations(range(len(ranks)), 2):
        if same_host(ranks[one], ranks[other]):
            found[one, other] = found[other, one] = inf
    return found


def _between(one: RankTransfers, other: RankTransfers, ends: np.ndarray) -> Clock:
    """The clock that maps times of `other` to times of `one`. ends: those of their meetings, on their own clocks."""
    if same_host(one, other):
        return Clock(other.base_us - one.base_us + other.start_us - one.start_us)
    ends = ends - [one.start_us, other.start_us]
    apart, at = ends[:, 0] - ends[:, 1], ends[:, 1]
    third = len(ends) // 3
    if len(ends) >= _ENOUGH_FOR_DRIFT:
        order = np.argsort(at)
        first, last = order[:third], order[-third:]
        change = float(np.median(apart[last]) - np.median(apart[first]))
        span = float(np.median(at[last]) - np.median(at[first]))
        noise = max(float(np.median(np.abs(apart[part] - np.median(apart[part])))) for part in (first, last))
        if span > 0 and abs(change) > 4 * noise and abs(change) <= _LARGEST_DRIFT * span:
            drift = change / span
            return Clock(float(np.median(apart - drift * at)), drift)
    return Clock(float(np.median(apart)))
