"""How well the planner predicts ratios of two runs that differ in one thing: overlap, or the schedule."""

import math
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.common import table

from .fit import HOSTS, Point


def ratio_errors(points: Sequence[Point]) -> str:
    """A table of measured and predicted ratios of step times."""
    lines = [
        (what, point.row.name, f"{measured:.3f}", f"{predicted:.3f}", f"{100 * (predicted - measured):+.1f}")
        for what, point, measured, predicted in pairs(points)
    ]
    errors = [abs(float(line[-1])) for line in lines]
    title = table("runs that differ in | model | measured ratio | predicted | difference, points", lines)
    return f"{title}\n\nmedian difference: {statistics.median(errors) if errors else math.nan:.1f} points"


def pairs(points: Sequence[Point]) -> Iterator[tuple[str, Point, float, float]]:
    """What differs, the second run, and the measured and the predicted ratio of second to first."""
    for i, a in enumerate(points):
        for b in points[i + 1 :]:
            one, other = a.row, b.row
            if one.record["group"] != other.record["group"] or one.load.shape.name != other.load.shape.name:
                continue
            what = _difference(a, b)
            if what:
                yield what, b, other.seconds / one.seconds, b.predicted[HOSTS[2]] / a.predicted[HOSTS[2]]


def _difference(a: Point, b: Point) -> str:
    """The only difference of two runs: "overlap", or the names of both schedules. Empty if there are others."""
    one, other = a.row.load, b.row.load
    same = (one.micro_batch, one.global_batch, one.precision, one.ep_backend, one.violation, one.seq) == (
        other.micro_batch, other.global_batch, other.precision, other.ep_backend, other.violation, other.seq,
    )  # fmt: skip
    sizes = [(d.num_ranks, d.tp, d.pp, d.ep, d.cp) for d in (one.layout, other.layout)]
    if not same or sizes[0] != sizes[1] or a.row.software != b.row.software:
        return ""
    if one.schedule != other.schedule:
        return f"{one.schedule} -> {other.schedule}" if one.overlaps == other.overlaps else ""
    return "overlap" if one.overlaps < other.overlaps else ""
