"""The ratio of measured to predicted step times, by GPU, precision and software.

The ratios are in constants.json, which `python -m benchmarks.planner fit` writes.
"""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...messages import quoted

FILE = Path(__file__).parent / "constants.json"
LEAST = math.log(1.06)
"""Published results for the same configuration differ by 6% (median), so no interval is narrower."""


@dataclass(frozen=True, slots=True)
class Constant:
    """factor: multiplies the predicted seconds. low, high: multiply them for the ends of the interval.

    rows: number of measured runs of this GPU, precision and software. 0: none, so the factor comes from other runs.
    """

    factor: float
    low: float
    high: float
    rows: int


@cache
def read_constants() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def find_constant(
    gpu: str, precision: str, software: str | None = None, known: dict[str, Any] | None = None, strict: bool = False
) -> Constant:
    """The constant of the runs that are most alike: the same GPU, precision and software, or else the same software.

    The mean of few families is uncertain, so it is pulled towards that of all runs, and the interval is wider. The
    largest errors are runs slower than predicted, so the interval is wider towards slow runs. strict: raise ValueError
    for a software that no run used.
    """
    known = read_constants() if known is None else known
    groups = known["groups"]
    names = sorted({group["software"] for group in groups})
    if strict and software not in (None, *names):
        raise ValueError(f"--software must be one of {', '.join(names)}: got {quoted(software)}")
    alike = [group for group in groups if software in (None, group["software"])]
    same = [group for group in alike if (group["gpu"], group["precision"]) == (gpu, precision)]
    prior, mean = known["prior"], known["mean"]
    families = family_means(same)
    mean = _drawn(mean, families or (family_means(alike) if software else []), prior)
    unit = known["spread"] * math.sqrt(1 + prior / (len(families) + prior))
    fast, slow = (max(LEAST, unit * known[side]) for side in ("fast", "slow"))
    rows = sum(group["rows"] for group in same)
    return Constant(math.exp(mean), math.exp(mean - fast), math.exp(mean + slow), rows)


def family_means(groups: Iterable[dict[str, Any]]) -> list[float]:
    """The mean log ratio of each family of models that is in any of the groups."""
    families: dict[str, list[float]] = {}
    for group in groups:
        for family, log_ratio in group["families"].items():
            families.setdefault(family, []).append(log_ratio)
    return [statistics.fmean(log_ratios) for log_ratios in families.values()]


def _drawn(mean: float, families: Sequence[float], prior: float) -> float:
    """The mean of the families, pulled towards `mean`, which counts as much as `prior` families."""
    return (prior * mean + sum(families)) / (prior + len(families))
