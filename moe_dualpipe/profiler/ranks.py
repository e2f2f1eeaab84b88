"""Compare the traces of several ranks: how long each waited for the others, and the offsets between their clocks.

A collective ends on all ranks at the same moment, after the last rank has joined. So the k-th collective is shortest on
the last rank to join; on other ranks, the extra time is waiting time. This needs no common clock. The ends give the
offsets between the clocks. Both need the same collectives in the same order on all ranks.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .trace import DeviceEvent

_POINT_TO_POINT = re.compile(r":(send|recv)")  # names of gloo; NCCL's kernel names do not distinguish them


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


@dataclass(frozen=True, slots=True)
class RankSkew:
    """One rank compared with the others, in microseconds. None: unknown."""

    waited_us: float | None
    """Total time by which its collectives were longer than those of the last rank to join."""
    shift_us: float | None
    """Start of its first event minus the start of rank 0's first event, on the clock of rank 0."""


def rank_skews(ranks: Sequence[RankTransfers]) -> tuple[RankSkew, ...]:
    """Return the skew of each rank.

    The collectives are comparable if their names are the same on all ranks, and if at least 9 of 10 have a moment when
    all ranks are inside. Clocks are not exact enough to require this of all collectives.
    """
    first = ranks[0]
    shifts = np.array([rank.base_us - first.base_us + rank.start_us - first.start_us for rank in ranks])
    one_clock = bool(first.host) and all(rank.host == first.host for rank in ranks)
    unknown = tuple(RankSkew(None, float(shift) if one_clock or len(ranks) == 1 else None) for shift in shifts)
    ordered = [
        sorted((event for event in rank.transfers if not _POINT_TO_POINT.search(event.name)), key=lambda e: e.start)
        for rank in ranks
    ]
    names = [[event.name for event in events] for events in ordered]
    if len(ranks) == 1 or not names[0] or any(other != names[0] for other in names):
        return unknown
    matched = [*zip(ranks, ordered, strict=True)]
    starts, ends = (
        np.array([[getattr(event, edge) - rank.start_us for event in events] for rank, events in matched])
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
