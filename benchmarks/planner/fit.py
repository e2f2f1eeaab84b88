"""Fit the planner's constants to published runs, and measure its error on families of models that were left out.

One constant for each (GPU, precision, software): the mean of log(measured / predicted seconds). Every family of models
counts once in it, whatever its number of rows. Groups with few families are drawn towards the mean of all groups.
"""

import itertools
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_dualpipe.tools.planner.constants import LEAST, Constant, family_means, find_constant
from moe_dualpipe.tools.planner.step import step_of

from .rows import Row

PRIOR = 1.0
"""Families that the mean of all groups counts for, against a group's own families."""
COVERED = 0.8
"""Share of the rows that should be inside the interval."""


@dataclass(frozen=True, slots=True)
class Point:
    """A row and its predicted seconds, without a constant."""

    row: Row
    predicted: float

    @property
    def log_ratio(self) -> float:
        return math.log(self.row.seconds / self.predicted)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.row.load.device.name, self.row.load.precision, self.row.software


@dataclass(frozen=True, slots=True)
class Score:
    """The error for a row with constants that know nothing of its family. inside: whether the interval has it."""

    point: Point
    error: float
    inside: bool


def predict(rows: Iterable[Row]) -> list[Point]:
    return [Point(row, step_of(row.load).seconds) for row in rows]


def fit(points: Sequence[Point]) -> dict[str, Any]:
    """The content of constants.json."""
    constants = _means(points)
    # The interval: so wide that COVERED of the rows would have been inside, had their family been left out, and half of
    # the others above. Many rows of one paper say no more than one of another, so a family counts once for each GPU,
    # precision and software.
    sizes = Counter((point.key, point.row.family) for point in points)
    surprises = [
        ((point.log_ratio - math.log(known.factor)) / math.log(known.high / known.factor),
         1 / sizes[point.key, point.row.family])
        for point, known in _left_out(points, _means)
    ]  # fmt: skip
    constants["fast"] = _quantile([(abs(surprise), weight) for surprise, weight in surprises], COVERED)
    constants["slow"] = max(constants["fast"], _quantile(surprises, (1 + COVERED) / 2))
    return constants


def _quantile(weighted: Iterable[tuple[float, float]], share: float) -> float:
    """The least of the values that `share` of the weight does not exceed; 1 if there are none."""
    ordered = sorted(weighted)
    enough = share * sum(weight for _, weight in ordered) - 1e-9
    sums = itertools.accumulate(weight for _, weight in ordered)
    return round(next((value for (value, _), sum_ in zip(ordered, sums, strict=True) if sum_ >= enough), 1.0), 4)


def _means(points: Sequence[Point]) -> dict[str, Any]:
    """Constants with an interval of one standard deviation."""
    groups: dict[tuple[str, str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in points:
        groups[point.key][point.row.family].append(point.log_ratio)
    found = [
        {"gpu": gpu, "precision": precision, "software": software, "rows": sum(map(len, families.values())),
         "families": {name: round(statistics.median(some), 4) for name, some in families.items()}}
        for (gpu, precision, software), families in sorted(groups.items())
    ]  # fmt: skip
    means = [statistics.fmean(group["families"].values()) for group in found]
    return {
        "mean": round(statistics.median(family_means(found)), 4),
        "spread": round(statistics.stdev(means) if len(means) > 1 else LEAST, 4),
        "prior": PRIOR, "fast": 1.0, "slow": 1.0, "groups": found,
    }  # fmt: skip


def _left_out(points: Sequence[Point], fit_to: Any) -> Iterable[tuple[Point, Any]]:
    """Each point, with the constant of a fit to the points of all other families."""
    for family in sorted({point.row.family for point in points}):
        known = fit_to([point for point in points if point.row.family != family])
        for point in points:
            if point.row.family == family:
                yield point, find_constant(*point.key, known=known)


def score(points: Sequence[Point]) -> list[Score]:
    """The errors with each family left out."""
    return [_scored(point, known) for point, known in _left_out(points, fit)]


def validate(points: Sequence[Point], known: dict[str, Any]) -> list[Score]:
    """The errors of rows that took no part in the fit `known`."""
    return [_scored(point, find_constant(*point.key, known=known)) for point in points]


def _scored(point: Point, constant: Constant) -> Score:
    ratio = point.row.seconds / point.predicted
    return Score(point, constant.factor / ratio - 1, constant.low <= ratio <= constant.high)
