"""Fit the planner's constants to published runs, and measure the error on runs that took no part in the fit.

All runs of a configuration share one vote, and a family of models with n votes weighs sqrt(n) in the fit. The causes of
the difference (constants.py) are fitted together by ridge regression of log(measured / predicted), with Huber's
weights, so that outliers count little. The seconds that a CPU takes for a launch are the candidate that best predicts
families that are left out of the fit.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from moe_dualpipe.tools.planner.constants import causes, find_constant
from moe_dualpipe.tools.planner.step import step_of

from .rows import Row

HOSTS = (4e-5, 5e-5, 6e-5, 7e-5, 8e-5, 9e-5)
"""Candidates for the seconds of a CPU for a launch."""
RIDGE = 0.6
"""How strongly a cause is shrunk toward 0: like this many votes for 0."""
HUBER = 0.08
"""Residuals beyond this count less. Results that were published twice for a configuration differ by 6% (median)."""
FAMILY_RIDGE, FAMILY_MOST = 3.0, 0.5
"""The same for the mean residual of a family, in which no run counts for more than FAMILY_MOST."""
COVERED = 0.9
"""Share that should be inside the interval. A family counts as in the fit, so that no large one decides alone."""


@dataclass(frozen=True)
class Point:
    """A row, its predicted seconds with each of HOSTS but without a constant, and its share of its configuration's
    vote."""

    row: Row
    predicted: Mapping[float, float]
    vote: float = 1.0

    @cached_property
    def names(self) -> list[str]:
        return [*causes(self.row.load, self.row.software)]

    def log_ratio(self, host: float) -> float:
        return math.log(self.row.seconds / self.predicted[host])


@dataclass(frozen=True, slots=True)
class Score:
    """The error for a point with constants that did not see it. inside: whether the interval has it."""

    point: Point
    error: float
    inside: bool


def predict(rows: Sequence[Row]) -> list[Point]:
    counts = Counter(row.configuration for row in rows)
    return [Point(row, _predicted(row), 1 / counts[row.configuration]) for row in rows]


def _predicted(row: Row) -> dict[float, float]:
    slowest = step_of(replace(row.load, host=HOSTS[-1])).seconds
    if step_of(replace(row.load, host=0.0)).seconds == slowest:
        return dict.fromkeys(HOSTS, slowest)
    return {host: step_of(replace(row.load, host=host)).seconds for host in HOSTS}


def fit(points: Sequence[Point]) -> dict[str, Any]:
    """The content of constants.json."""
    host = min(HOSTS, key=lambda host: _left_out_error(points, host))
    known = _constants(points, host)
    for name, key in GROUPS.items():
        left_out = [*_left_out(points, key, host)]
        weights = _weights([point for point, _ in left_out])
        surprises = [
            (_surprise(point, fitted, host), weight) for (point, fitted), weight in zip(left_out, weights, strict=True)
        ]
        tails = (1 - COVERED) / 2
        known["interval"][name] = [round(-_quantile(surprises, tails), 4), round(_quantile(surprises, 1 - tails), 4)]
    return known


GROUPS: dict[str, Callable[[Point], tuple[str, ...]]] = {
    "new family": lambda point: (point.row.family,),
    "known family": lambda point: (point.row.family, point.row.load.device.name),
}
"""What is left out together: a whole family, or its runs on one GPU."""


def _left_out_error(points: Sequence[Point], host: float) -> float:
    """The mean error of families of models, each predicted by a fit to the others."""
    left_out = [*_left_out(points, GROUPS["new family"], host)]
    errors = [min(FAMILY_MOST, abs(_surprise(point, fitted, host))) for point, fitted in left_out]
    return float(np.average(errors, weights=_weights([point for point, _ in left_out]))) if left_out else 0.0


def _constants(points: Sequence[Point], host: float) -> dict[str, Any]:
    """Constants without intervals."""
    mean, logs = _solve(points, host)
    votes: Counter[str] = Counter()
    residuals: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in points:
        votes.update(dict.fromkeys(point.names, point.vote))  # pyright: ignore[reportArgumentType]
        residual = point.log_ratio(host) - mean - sum(logs[name] for name in point.names)
        residuals[point.row.family].append((min(FAMILY_MOST, max(-FAMILY_MOST, residual)), point.vote))
    families = {}
    for family, own in sorted(residuals.items()):
        weight = sum(vote for _, vote in own)
        log = sum(residual * vote for residual, vote in own) / (weight + FAMILY_RIDGE)
        families[family] = {"log": round(log, 4), "runs": round(weight)}
    return {
        "host": {"x86": host, "grace": host}, "mean": round(mean, 4),
        "causes": {name: {"log": round(log, 4), "runs": round(votes[name])} for name, log in logs.items()},
        "families": families, "interval": {name: [1.0, 1.0] for name in GROUPS},
    }  # fmt: skip


def _weights(points: Sequence[Point]) -> np.ndarray:
    """A family with n votes weighs sqrt(n)."""
    families: Counter[str] = Counter()
    for point in points:
        families[point.row.family] += point.vote  # pyright: ignore[reportArgumentType]
    return np.array([point.vote / families[point.row.family] ** 0.5 for point in points])


def _solve(points: Sequence[Point], host: float) -> tuple[float, dict[str, float]]:
    """The mean logarithm, and that of each cause."""
    names = sorted({name for point in points for name in point.names})
    columns = np.array([[1.0, *(name in point.names for name in names)] for point in points])
    weights = _weights(points)
    logs = np.array([point.log_ratio(host) for point in points])
    ridge = np.diag([1e-6, *[RIDGE] * len(names)])
    robust, found, left = weights, np.zeros(len(names) + 1), logs
    for _ in range(10):
        found = np.linalg.solve(columns.T @ (columns * robust[:, None]) + ridge, columns.T @ (robust * logs))
        left = np.abs(logs - columns @ found)
        robust = weights * np.minimum(1, HUBER / np.maximum(left, 1e-9))
    return float(found[0]), dict(zip(names, map(float, found[1:]), strict=True))


def _left_out(
    points: Sequence[Point], key: Callable[[Point], tuple[str, ...]], host: float | None = None
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Each point, with the constants of a fit to the points of all other groups. host: use this one, and fit no
    intervals."""
    for left in sorted({key(point) for point in points}):
        others = [point for point in points if key(point) != left]
        if others:
            known = fit(others) if host is None else _constants(others, host)
            yield from ((point, known) for point in points if key(point) == left)


def _surprise(point: Point, known: dict[str, Any], host: float) -> float:
    constant = find_constant(point.row.load, point.row.software, known)
    return point.log_ratio(host) - math.log(constant.factor)


def _quantile(weighted: Iterable[tuple[float, float]], share: float) -> float:
    """The least of the values that `share` of the weight does not exceed; 0 if there are none."""
    ordered = sorted(weighted)
    sums = np.cumsum([weight for _, weight in ordered])
    return ordered[int(np.searchsorted(sums, share * sums[-1] - 1e-9))][0] if ordered else 0.0


def score(points: Sequence[Point], group: str) -> list[Score]:
    """The errors with each group left out. group: a key of GROUPS."""
    scores = []
    for point, known in _left_out(points, GROUPS[group]):
        constant = find_constant(point.row.load, point.row.software, known)
        ratio = math.exp(point.log_ratio(known["host"]["x86"]))
        scores.append(Score(point, constant.factor / ratio - 1, constant.low <= ratio <= constant.high))
    return scores


def summary(scores: Sequence[Score]) -> tuple[float, float, float, float, float]:
    """Votes, mean and median absolute error, and the shares that are inside, and predicted too slow."""
    votes = [one.point.vote for one in scores]
    errors = [abs(one.error) for one in scores]
    mean = float(np.average(errors, weights=votes))
    inside, slow = (float(np.average(flags, weights=votes)) for flags in (
        [one.inside for one in scores], [one.error > 0 for one in scores]))  # fmt: skip
    return sum(votes), mean, _quantile(zip(errors, votes, strict=True), 0.5), inside, slow
