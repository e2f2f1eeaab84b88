"""Several ranks' traces together: who waited for whom, and how far their clocks are apart.

Collective kernels run until the last rank has come: of the k-th on every rank, the one of the last to come is the
shortest, and what the others take beyond it they waited. That needs no clock. They end together, and that sets the
clocks. Both need ranks that communicate alike: the same collectives in the same order.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .trace import DeviceEvent

_POINT_TO_POINT = re.compile(r":(send|recv)")  # of gloo; NCCL's kernels do not say


@dataclass(frozen=True, slots=True)
class RankTransfers:
    """What is to be compared of a rank's trace. Microseconds."""

    transfers: Sequence[DeviceEvent]
    start_us: float
    """When its first work started."""
    base_us: float = 0.0
    """What its times are counted from."""
    host: str = ""
    """Ranks of one host have one clock."""


@dataclass(frozen=True, slots=True)
class RankSkew:
    """Of one rank among others. Microseconds."""

    waited_us: float | None
    """How much longer its transfers took than those of the rank that came last to each; a sum. None: unknown."""
    shift_us: float | None
    """How much later than the first rank's its first work started, on the first rank's clock. None: unknown."""


def rank_skews(ranks: Sequence[RankTransfers]) -> tuple[RankSkew, ...]:
    """What the ranks' transfers say of each other; of clocks, also what the hosts say.

    The k-th collectives of all ranks are taken for one and the same if they have the same names, and if there is a
    moment at which all ranks are in them, as there must be: for 9 of 10, as clocks are never quite the same.
    """
    first = ranks[0]
    shifts = np.array([rank.base_us - first.base_us + rank.start_us - first.start_us for rank in ranks])
    one_clock = bool(first.host) and all(rank.host == first.host for rank in ranks)
    unknown = tuple(RankSkew(None, float(shift) if one_clock or len(ranks) == 1 else None) for shift in shifts)
    ordered = [
        sorted((work for work in rank.transfers if not _POINT_TO_POINT.search(work.name)), key=lambda work: work.start)
        for rank in ranks
    ]
    names = [[work.name for work in works] for works in ordered]
    if len(ranks) == 1 or not names[0] or any(other != names[0] for other in names):
        return unknown
    starts, ends = (
        np.array(
            [
                [getattr(work, edge) - rank.start_us for work in works]
                for rank, works in zip(ranks, ordered, strict=True)
            ]
        )
        for edge in ("start", "end")
    )
    if not one_clock:
        shifts = np.median(ends[0] - ends, axis=1)
    on_one = shifts[:, None]
    meet = (starts + on_one).max(axis=0) <= (ends + on_one).min(axis=0)
    if meet.mean() < 0.9:
        return unknown
    waited = (ends - starts - (ends - starts).min(axis=0)).sum(axis=1)
    return tuple(RankSkew(float(w), float(shift)) for w, shift in zip(waited, shifts, strict=True))
