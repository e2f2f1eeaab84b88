"""Measured over predicted step times, by GPU, precision and software.

constants.json has them; `python -m benchmarks.planner fit` writes it.
"""

import json
import math
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..messages import quoted

FILE = Path(__file__).parent / "constants.json"
LEAST = math.log(1.06)
"""Repeated publications of one configuration differ by this much (the median): no interval is narrower."""


@dataclass(frozen=True, slots=True)
class Constant:
    """factor: what predicted seconds are multiplied by. low, high: the same for the ends of the interval.

    rows: measured runs behind it, of this GPU, precision and software. 0: none, it is that of all runs.
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
    """The constant of the runs that are most alike: the same GPU, precision and software, if there are any.

    Few runs say little: their mean is drawn towards that of all runs, and the interval is wider. strict: raise
    ValueError for a software that no run used.
    """
    known = read_constants() if known is None else known
    names = sorted({group["software"] for group in known["groups"]})
    if strict and software not in (None, *names):
        raise ValueError(f"--software must be one of {', '.join(names)}: got {quoted(software)}")
    mean, spread = known["mean"], known["spread"]
    found = [
        group for group in known["groups"]
        if group["gpu"] == gpu and group["precision"] == precision and software in (None, group["software"])
    ]  # fmt: skip
    families: dict[str, list[float]] = {}
    for group in found:
        for family, log_ratio in group["families"].items():
            families.setdefault(family, []).append(log_ratio)
    number, prior = len(families), known["prior"]
    if number:
        own = statistics.fmean(map(statistics.fmean, families.values()))
        mean += (own - mean) * number / (number + prior)
    width = max(LEAST, spread * math.sqrt(1 + prior / (number + prior)) * known["width"])
    return Constant(math.exp(mean), math.exp(mean - width), math.exp(mean + width), sum(g["rows"] for g in found))
