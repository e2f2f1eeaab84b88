"""The routing of a real run: how many tokens each expert of each layer got, and what that costs a plan.

All ranks of an expert group wait for the fullest of each layer. The memory is that of the rank that gets the most over
all layers. A rank holds consecutive experts, as in this project.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

from ...checkpoint.expert_loads import read_loads
from ...expert_parallel.placement import check_loads, in_order, relative
from ...messages import printable
from ...models.shape import ModelShape


@dataclass(frozen=True, eq=False)
class MeasuredLoads:
    """Loads of the experts of each layer, and the file that they are from."""

    source: str
    layers: tuple[int, ...]
    loads: tuple[tuple[float, ...], ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ValueError for a file without loads."""
        layers, loads = read_loads(path)
        try:
            check_loads(loads)
        except ValueError as error:
            raise ValueError(f"{printable(path)}: {error}") from None
        return cls(str(path), tuple(layers), tuple(map(tuple, loads)))

    def check(self, shape: ModelShape) -> None:
        """Raise ValueError, on one line, unless these are the loads of a model like `shape`."""
        layers = [index for index, layer in enumerate(shape.layers) if layer.experts]
        experts, got = max(layer.experts for layer in shape.layers), len(self.loads[0])
        name = f"--loads {printable(self.source)}"
        if not experts:
            raise ValueError(f"{name}: {shape.name} has no experts; leave out --loads")
        if got != experts:
            raise ValueError(
                f"{name} has loads of {got} experts, and {shape.name} has {experts}; use a run of this model"
            )
        if not {*layers} <= {*self.layers} and len(self.layers) != len(layers):
            raise ValueError(
                f"{name} has loads of {len(self.layers)} layers, and {shape.name} has {len(layers)} layers with "
                "experts; use a run of this model"
            )

    def factors(self, shape: ModelShape, ep: int) -> list[float]:
        """For each layer of the model, the load of the fullest of `ep` ranks divided by the mean; 1 without experts.

        Example: loads [[3, 1, 2, 2]] and 2 ranks: both have 4, so 1.0. With 4 ranks, 1.5.
        """
        return [*map(max, self._of_ranks(shape, ep))]

    def fullest(self, shape: ModelShape, ep: int) -> float:
        """The load of the rank that gets the most tokens over all layers with experts, divided by the mean.

        Example: loads [[3, 1], [2, 6]] and 2 ranks: rank 1 gets 0.5 and 1.5 times the mean, rank 0 1.5 and 0.5: 1.0.
        """
        layers = zip(self._of_ranks(shape, ep), shape.layers, strict=True)
        own = [of_layer for of_layer, layer in layers if layer.experts]
        return max(math.fsum(of_rank) / len(own) for of_rank in zip(*own, strict=True))

    def _of_ranks(self, shape: ModelShape, ep: int) -> list[list[float]]:
        """For each layer of the model, the load of each of `ep` ranks divided by the mean; 1 without experts.

        Loads without numbers of layers, or with other numbers, belong to the layers with experts in their order.
        """
        by_layer = dict(zip(self.layers, _relative(self, ep), strict=True))
        layers = [index for index, layer in enumerate(shape.layers) if layer.experts]
        if not {*layers} <= {*by_layer}:
            by_layer = dict(zip(layers, by_layer.values(), strict=True))
        return [by_layer[index] if layer.experts else [1.0] * ep for index, layer in enumerate(shape.layers)]


@lru_cache(maxsize=256)
def _relative(measured: MeasuredLoads, ep: int) -> list[list[float]]:
    loads = measured.loads
    return relative(in_order(len(loads), len(loads[0]), ep).gpu_loads(loads))
