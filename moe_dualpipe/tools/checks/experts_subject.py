"""An expert layer under test. It is built for any range of experts, and called with any number of rows per expert.

M rows in expert-major order, E experts, D model dim.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.routing import expert_order
from ...models.build_experts import ExpertBuilder
from ...models.config import ModelConfig
from .laws import check_like_input
from .subject import Subject, prepare, random_like


@dataclass
class Experts:
    """The expert layer that `config` names."""

    config: ModelConfig
    device: str = "cpu"

    _built: dict[range, nn.Module] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        """The layer with all experts. All laws use the same one; the law "deterministic" may set it to eval mode."""
        return self.built(range(self.config.num_experts))

    @property
    def counts(self) -> list[int]:
        """Number of rows of each expert: uneven, and at least 2. Example: [3, 2, 5, 4]."""
        return [2 + (3 * e + 1) % 4 for e in range(self.config.num_experts)]

    def build(self, local: range, seed: int = 0) -> nn.Module:
        layer = ExpertBuilder(self.config, self.config.num_layers - 1, seed).build(local)
        return prepare(layer, seed, device=self.device)

    def built(self, local: range) -> nn.Module:
        """The layer with the experts `local`, built once."""
        if local not in self._built:
            self._built[local] = self.build(local)
        return self._built[local]

    def whole(self, counts: Sequence[int] | None = None) -> Subject:
        """All experts. counts: the number of rows of each."""
        return self._subject(self.module, range(self.config.num_experts), self.counts if counts is None else counts)

    def part(self, local: range, counts: Sequence[int]) -> Subject:
        """A layer of the experts `local` alone."""
        return self._subject(self.built(local).train(self.module.training), local, counts)

    def _subject(self, module: nn.Module, local: range, counts: Sequence[int]) -> Subject:
        return Subject(
            module,
            lambda layer, x: (call(layer, x, counts),),
            lambda seed: self.rows(sum(counts), seed),
            lambda seed: self.build(local, seed),
            lambda row: row_name(counts, row[0], local.start),
        )

    def rows(self, number: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return random_like(torch.empty(number, self.config.hidden_size, dtype=dtype, device=self.device), seed)


def call(layer: Any, x_MD: Tensor, counts: Sequence[int]) -> Tensor:
    """Run the experts on rows in expert-major order. A layer that takes an order gets one choice of weight 1 per row.

    Raises Broken if the layer does not return rows of the same shape and dtype.
    """
    counts_E = torch.tensor(counts, device=x_MD.device)
    if getattr(layer, "takes_order", False):
        ids_M = torch.arange(len(counts), device=x_MD.device).repeat_interleave(counts_E)
        order = expert_order(ids_M[:, None], len(counts), len(x_MD))
        weights_M1 = x_MD.new_ones(len(x_MD), 1, dtype=torch.promote_types(x_MD.dtype, torch.float32))
        y_MD = layer(x_MD, order, weights_M1)
    else:
        offsets = nn.functional.pad(counts_E.cumsum(0), (1, 0)).to(torch.int32)
        y_MD = layer(x_MD, offsets)
    check_like_input("forward", x_MD, y_MD, "rows ")
    return y_MD


def row_name(counts: Sequence[int], row: int, first_expert: int = 0) -> str:
    """Example: counts [3, 2] and row 4 -> "row 1 of expert 1"."""
    expert = 0
    while expert < len(counts) - 1 and row >= counts[expert]:
        row -= counts[expert]
        expert += 1
    return f"row {row} of expert {first_expert + expert}"


def starts(counts: Sequence[int]) -> list[int]:
    """The first row of each expert. Example: [3, 2, 4] -> [0, 3, 5]."""
    return [sum(counts[:e]) for e in range(len(counts))]
