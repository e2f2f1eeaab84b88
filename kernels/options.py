"""The options of operators, as values. This module imports no torch, so that a command line can be read without it."""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Literal, get_args

Kernels = Literal["auto", "triton", "reference"]
"""The implementation of an operator; backend.py chooses by it."""
Fp8 = Literal["off", "experts", "experts+dispatch"]
Products = Literal["auto", "mkl", "onednn"]
"""The library that multiplies fp32 matrices on a CPU; products.py chooses by it."""
_KERNELS: tuple[str, ...] = get_args(Kernels)


def validate_kernels(kernels: str) -> Kernels:
    """Return `kernels`. Raises ValueError for an unknown value, and for "triton" if triton is not installed."""
    if kernels not in _KERNELS:
        raise ValueError(f"kernels must be one of {', '.join(_KERNELS)}: got {kernels!r}")
    if kernels == "triton" and not has_triton():
        raise ValueError('kernels="triton" needs the triton package, which is not installed: use kernels="reference"')
    return kernels  # type: ignore[return-value]


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


Score = Literal["softmax", "sigmoid"]
"""The function from router logits to scores."""
GroupScore = Literal["best_two", "best"]
"""The score of a group of experts: the sum of its two best scores, or its best score."""


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """Options of `routing.route`, which documents them."""

    k: int
    score: Score = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0
    group_score: GroupScore = "best_two"

    def check(self, num_experts: int) -> None:
        """Raise ValueError for options that are invalid with this number of experts."""
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score must be softmax or sigmoid: got {self.score!r}")
        if self.group_score not in ("best_two", "best"):
            raise ValueError(f"group_score must be best_two or best: got {self.group_score!r}")
        if self.num_groups < 1 or num_experts % self.num_groups:
            raise ValueError(f"{num_experts} experts cannot be divided evenly into {self.num_groups} groups")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups must be from 1 to {self.num_groups} groups: got {self.top_groups}")
        eligible = num_experts // self.num_groups * self.top_groups
        if not 1 <= self.k <= eligible:
            raise ValueError(f"k must be from 1 to {eligible}, the number of eligible experts: got {self.k}")
