"""How unevenly the experts of a layer are loaded, and what that costs a plan.

In each layer of each step, all ranks of an expert group wait for the fullest one. So what counts is the mean of its
load over steps. A file with loads has their sum over steps, whose maximum is smaller, and the mean over steps of the
largest load of an expert. The loads of a step are modeled as log-normal around their mean, with a width, found by
bisection, at which the largest load is as measured. Without a file, the experts are alike, and the largest load is 1 +
MaxVio times the mean (the maximal violation of arXiv 2408.15664). Random draws are always the same, so results can be
compared.

The memory is that of the rank that gets the most over all layers and steps.

E experts, S slots: an expert may have copies, which get equal shares. N draws.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from ...checkpoint.expert_loads import read_loads
from ...expert_parallel.placement import ExpertPlacement, check_loads, in_order, relative
from ...messages import printable
from ...models.shape import ModelShape

VIOLATION = 0.35
"""MaxVio of training runs with real routing: of 0, 0.2, 0.3, 0.35 and 0.4, the value with which published runs are
predicted best."""
DRAWS = 128


@dataclass(frozen=True, eq=False)
class MeasuredLoads:
    """Loads of the experts of each layer, and the file that they are from.

    maxima: for each layer, the largest load of an expert divided by the mean, as a mean over steps.
    """

    source: str
    layers: tuple[int, ...]
    loads: tuple[tuple[float, ...], ...]
    maxima: tuple[float, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the loads of a run. Raises ValueError for a file without loads."""
        layers, loads, maxima = read_loads(path)
        try:
            check_loads(loads)
        except ValueError as error:
            raise ValueError(f"{printable(path)}: {error}") from None
        return cls(str(path), tuple(layers), tuple(map(tuple, loads)), tuple(maxima))

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError, on one line, unless these are the loads of a model like `shape`."""
        layers = _routed(shape)
        experts, got = max(layer.experts for layer in shape.layers), len(self.loads[0])
        name = f"--loads {printable(self.source)}"
        if got != experts:
            raise ValueError(
                f"{name} has loads of {got} experts, and {shape.name} has {experts}; use a run of this model"
            )
        if not {*layers} <= {*self.layers} and len(self.layers) != len(layers):
            raise ValueError(
                f"{name} has loads of {len(self.layers)} layers, and {shape.name} has {len(layers)} layers with "
                "experts; use a run of this model"
            )

    def factors(self, shape: ModelShape, ep: int, placement: ExpertPlacement | None = None) -> list[float]:
        """For each layer of the model, the load of the fullest of `ep` ranks divided by the mean, as a mean over steps;
        1 without experts. placement: None: in order.

        Example: equal steps with loads [[3, 1, 2, 2]], and 2 ranks: both have 4, so 1.0. With 4 ranks, 1.5.
        """
        own = placement or in_order(len(self.loads), len(self.loads[0]), ep)
        rows = zip(self.loads, self.maxima, own.experts, strict=True)
        found = [fullest(load_E, highest, slots_S, ep) for load_E, highest, slots_S in rows]
        return [1.0 if row is None else found[row] for row in self._rows(shape)]

    def fullest(self, shape: ModelShape, ep: int, placement: ExpertPlacement | None = None) -> float:
        """The load of the rank that gets the most tokens over all layers with experts, divided by the mean.

        Example: loads [[3, 1], [2, 6]] and 2 ranks: rank 1 gets 0.5 and 1.5 times the mean, rank 0 1.5 and 0.5: 1.0.
        """
        placement = placement or in_order(len(self.loads), len(self.loads[0]), ep)
        by_row = relative(placement.gpu_loads(self.loads))
        own = [by_row[row] for row in self._rows(shape) if row is not None]
        return max(math.fsum(of_rank) / len(own) for of_rank in zip(*own, strict=True))

    def _rows(self, shape: ModelShape) -> list[int | None]:
        """For each layer of the model, its row here; None without experts.

        Loads without layer numbers, or with other ones, belong to the layers with experts, in order.
        """
        layers = _routed(shape)
        row_of = {layer: row for row, layer in enumerate(self.layers)}
        if not {*layers} <= {*row_of}:
            row_of = {layer: row for row, layer in enumerate(layers)}
        return [row_of[index] if layer.experts else None for index, layer in enumerate(shape.layers)]


def _routed(shape: ModelShape) -> list[int]:
    return [index for index, layer in enumerate(shape.layers) if layer.experts]


@lru_cache(maxsize=4096)
def fullest(load_E: tuple[float, ...], highest: float, slots_S: tuple[int, ...], ep: int) -> float:
    """The load of the fullest of `ep` ranks, divided by the mean, as a mean over steps.

    highest: the same for the fullest expert. slots_S: the expert in each slot; ranks have consecutive slots.
    """
    load_NE = _steps(load_E, highest)
    share_S = 1 / np.bincount(slots_S)[[*slots_S]]
    load_NR = (load_NE[:, slots_S] * share_S).reshape(len(load_NE), ep, -1).mean(2)
    return float((load_NR.max(1) / load_NR.mean(1)).mean())


@lru_cache(maxsize=1024)
def _steps(load_E: tuple[float, ...], highest: float) -> np.ndarray:
    """Loads of experts in some steps, relative to the mean: log-normal around `load_E`. One step if all are alike."""
    mean = math.fsum(load_E) / len(load_E)
    relative_E = np.array(load_E) / mean if mean else np.ones(len(load_E))
    if relative_E.max() * (1 + 1e-9) >= highest:
        return relative_E[None]
    noise_NE = np.random.default_rng(0).standard_normal((DRAWS, len(load_E)))
    low, high = 0.0, 8.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        load_NE = relative_E * np.exp(middle * noise_NE)
        if (load_NE.max(1) / load_NE.mean(1)).mean() < highest:
            low = middle
        else:
            high = middle
    return relative_E * np.exp(high * noise_NE)


def assumed_factor(experts: int, top_k: int, ep: int, violation: float) -> float:
    """The load of the fullest of `ep` ranks, divided by the mean, without measured loads. Example: with one rank, 1."""
    if ep == 1 or not experts or not violation:
        return 1.0
    most = experts / top_k  # a token chooses an expert at most once: no expert gets more than 1 / top_k of all choices
    return fullest((1.0,) * experts, min(1 + violation, most), tuple(range(experts)), ep)
