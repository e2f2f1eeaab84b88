"""Sets of points in time, as arrays of disjoint intervals: how long was anything of a kind running?

Sums over events count a moment twice in which two of them run; unions do not. An array has the shape [n, 2], a row is
[start, end), sorted and disjoint once `union` has made it so.
"""

from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

Intervals = NDArray[np.float64]
Mask = NDArray[np.bool_]
EMPTY: Intervals = np.empty((0, 2))


def union(intervals: Intervals) -> Intervals:
    """All points that are in any of the intervals, which may touch, overlap, be nested or empty, in any order."""
    intervals = intervals[intervals[:, 1] > intervals[:, 0]]
    if not len(intervals):
        return EMPTY
    intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]
    reach = np.maximum.accumulate(intervals[:, 1])
    first = np.concatenate([[True], intervals[1:, 0] > reach[:-1]])  # starts where nothing before it reaches
    last = np.concatenate([first[1:], [True]])
    return np.stack([intervals[first, 0], reach[last]], axis=1)


def total(intervals: Intervals) -> float:
    """The length of a union."""
    return float((intervals[:, 1] - intervals[:, 0]).sum())


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """The points that are in both of two unions."""
    return _where(a, b, lambda in_a, in_b: in_a & in_b)


def difference(a: Intervals, b: Intervals) -> Intervals:
    """The points that are in the union `a` and not in `b`."""
    return _where(a, b, lambda in_a, in_b: in_a & ~in_b)


def _where(a: Intervals, b: Intervals, wanted: Callable[[Mask, Mask], Mask]) -> Intervals:
    """The points for which `wanted` holds, given whether they are in `a` and in `b`; it is False outside of both."""
    points = np.concatenate([a.ravel(), b.ravel()])
    order = np.argsort(points, kind="stable")
    edges = np.ones(len(points), dtype=np.int64)
    edges[1::2] = -1  # starts are even in both
    own = np.arange(len(points)) < a.size
    in_a = np.cumsum(np.where(own, edges, 0)[order]) > 0
    in_b = np.cumsum(np.where(own, 0, edges)[order]) > 0
    points = points[order]
    held = np.flatnonzero(wanted(in_a, in_b)[:-1]) if len(points) else np.empty(0, dtype=np.int64)
    return union(np.stack([points[held], points[held + 1]], axis=1)) if len(held) else EMPTY


def as_intervals(pairs: Iterable[tuple[float, float]]) -> Intervals:
    """[n, 2] from starts and ends, also where there are none."""
    rows = list(pairs)
    return np.array(rows) if rows else EMPTY


def length_before(a: Intervals) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """A function of points: how much of the union `a` lies before each. Its difference is what lies between two."""
    if not len(a):
        return np.zeros_like
    lengths = np.cumsum(a[:, 1] - a[:, 0])
    heights = np.stack([np.concatenate([[0.0], lengths[:-1]]), lengths], axis=1)
    return lambda points: np.interp(points, a.ravel(), heights.ravel())
