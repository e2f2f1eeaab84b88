"""Interval arithmetic, compared with sets of integer points."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_dualpipe.tools.profiler.intervals import EMPTY, difference, intersection, union, union_length

MANY = settings(max_examples=100, deadline=None)
# Few points, so that adjacent, nested, equal and empty intervals are frequent.
some = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)).map(lambda p: (p[0], p[0] + p[1])), max_size=12)


def array(intervals):
    return np.array(intervals, dtype=float) if intervals else EMPTY


def points(intervals):
    return {point for start, end in np.asarray(intervals).tolist() for point in range(int(start), int(end))}


def is_union(intervals):
    assert intervals.shape[1] == 2
    assert all(start < end for start, end in intervals)
    assert all(before[1] < after[0] for before, after in pairwise(intervals))


@MANY
@given(some, some)
def test_operations_agree_with_sets_of_points(a, b):
    a, b = union(array(a)), union(array(b))
    for result, expected in (
        (a, points(a)),
        (intersection(a, b), points(a) & points(b)),
        (difference(a, b), points(a) - points(b)),
    ):
        is_union(result)
        assert points(result) == expected
        assert union_length(result) == len(expected)
