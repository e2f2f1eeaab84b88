"""The ratio of measured to predicted step times, from published runs.

The logarithm of the ratio is a sum: a mean, and one number for each cause of the difference: the GPU, the software,
FSDP, experts that are launched one by one, and the family of the model, which stands for its kernels of attention and
experts. The fewer runs a number has, the more it is shrunk toward 0. `python -m benchmarks.planner fit` writes them to
constants.json.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ...messages import quoted
from .workload import Workload

FILE = Path(__file__).parent / "constants.json"
FAMILIES = {
    "llama": ("llama",), "gpt": ("gpt-", "gpt3"), "gpt-oss": ("gpt-oss",), "qwen3": ("qwen3",), "mixtral": ("mixtral",),
    "deepseek": ("deepseek", "moonlight", "kimi"), "megascale": ("megascale",), "nemotron": ("nemotron",),
    "mpt": ("mpt",),
}  # fmt: skip
"""How the names of the models of a family start."""
FSDP = ("automodel", "mpt", "torchtitan")
"""Software that divides the weights over replicas. They are gathered before each layer, forward and backward, by
kernels that take multiprocessors and memory bandwidth from the products beside them. The prediction is that of ZeRO-1,
which gathers weights once in a step; this cause covers the difference."""


@dataclass(frozen=True, slots=True)
class Constant:
    """factor: multiplies the predicted seconds. low, high: multiply them for the ends of the interval.

    runs: published configurations on this GPU. family_runs: published configurations of this family of models.
    """

    factor: float
    low: float
    high: float
    runs: int = 0
    family_runs: int = 0


@cache
def read_constants() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def family_of(name: str) -> str:
    """The family of a model, or its own name."""
    matches = [family for family, starts in FAMILIES.items() if name.startswith(starts)]
    return max(matches, key=len, default=name)


def causes(load: Workload, software: str | None = None) -> Iterator[str]:
    """The causes of the difference for this run, apart from the family of its model."""
    yield f"gpu {load.device.name}"
    if software:
        yield f"software {software}"
    if software in FSDP:
        yield "weights divided over replicas (FSDP)"
    # Before these launches, the CPU waits for the GPU to know how many tokens each expert has. No segment counts that.
    if load.experts_one_by_one and any(layer.experts for layer in load.shape.layers):
        yield "experts launched one by one on a GPU with mxfp8"


def find_constant(
    load: Workload, software: str | None = None, known: dict[str, Any] | None = None, strict: bool = False
) -> Constant:
    """The constant of a workload. strict: raise ValueError for software that no run used."""
    known = read_constants() if known is None else known
    names = sorted(name.removeprefix("software ") for name in known["causes"] if name.startswith("software "))
    if strict and software not in (None, *names):
        raise ValueError(f"--software must be one of {', '.join(names)}: got {quoted(software)}")
    family, nothing = known["families"].get(family_of(load.shape.name)), {"log": 0.0, "runs": 0}
    found = [known["causes"].get(name, nothing) for name in causes(load, software)]
    mean = known["mean"] + sum(one["log"] for one in found) + (family or nothing)["log"]
    fast, slow = known["interval"]["known family" if family else "new family"]
    return Constant(
        math.exp(mean), math.exp(mean - fast), math.exp(mean + slow), found[0]["runs"], (family or nothing)["runs"]
    )
