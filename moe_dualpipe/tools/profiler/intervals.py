"""Arithmetic on sets of time intervals: union, intersection, difference, and total length.

A set is an array of shape [n, 2] with rows [start, end). The rows of a `union` are sorted and disjoint, so a moment in
which two events run counts once in its `union_length`.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from .trace import DeviceEvent, HostEvent

Intervals = NDArray[np.float64]
Mask = NDArray[np.bool_]
EMPTY: Intervals = np.empty((0, 2))


def union(intervals: Intervals) -> Intervals:
    """Return the union of intervals in any order, which may touch, overlap or be empty."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return EMPTY
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate([[True], intervals[1:, 0] > reach[:-1]])  # all earlier intervals end before it
    last = np.concatenate([first[1:], [True]])
    return np.stack([intervals[first, 0], reach[last]], axis=1)


def union_length(intervals: Intervals) -> float:
    """The length of a union."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return the points that are in both unions."""
    return _where(a, b, lambda in_a, in_b: in_a & in_b)


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Return the points of the union `a` that are not in the union `b`."""
    return _where(a, b, lambda in_a, in_b: in_a & ~in_b)


def _where(a: Intervals, b: Intervals, wanted: Callable[[Mask, Mask], Mask]) -> Intervals:
    """Return the points for which `wanted(in_a, in_b)` is true. It must be False outside of both unions."""
    points = np.concatenate([a.ravel(), b.ravel()])
    order = np.argsort(points, kind="stable")
    edges = np.ones(len(points), dtype=np.int64)
    edges[1::2] = -1  # the points alternate between starts and ends
    own = np.arange(len(points)) < a.size
    in_a = np.cumsum(np.where(own, edges, 0)[order]) > 0
    in_b = np.cumsum(np.where(own, 0, edges)[order]) > 0
    points = points[order]
    held = np.flatnonzero(wanted(in_a, in_b)[:-1]) if len(points) else np.empty(0, dtype=np.int64)
    return union(np.stack([points[held], points[held + 1]], axis=1)) if len(held) else EMPTY


def as_intervals(pairs: Iterable[tuple[float, float]]) -> Intervals:
    """Return pairs of (start, end) as an array of shape [n, 2]."""
    rows = list(pairs)
    return np.array(rows) if rows else EMPTY


def intervals_of(events: Iterable[DeviceEvent | HostEvent]) -> Intervals:
    """Return the intervals of the events, not merged."""
    return as_intervals((event.start, event.end) for event in events)


def length_before(a: Intervals) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """Return a function that maps points to the length of the union `a` before each point."""
    if not len(a):
        return np.zeros_like
    lengths = np.cumsum(a[:, 1] - a[:, 0])
    heights = np.stack([np.concatenate([[0.0], lengths[:-1]]), lengths], axis=1)
    return lambda points: np.interp(points, a.ravel(), heights.ravel())
