"""An expert layer under test. It is built for any range of experts, and called with any number of rows per expert.

M rows in expert-major order, E experts, D model dim.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.routing import expert_order
from ...models.build_experts import ExpertBuilder
from ...models.config import ModelConfig
from .subject import Outputs, Subject, check_like, prepare


class Experts(Subject):
    """The expert layer that `config` names, with the experts `local`, called with `counts` rows of each.

    None: all experts, with an uneven number of rows, at least 2. Example: [3, 2, 5, 4].
    """

    def __init__(
        self, config: ModelConfig, device: str = "cpu", local: range | None = None, counts: Sequence[int] | None = None
    ):
        super().__init__(config, device)
        self.local = range(config.num_experts) if local is None else local
        self.counts = [2 + (3 * e + 1) % 4 for e in self.local] if counts is None else [*counts]

    def build(self, seed: int) -> nn.Module:
        layer = ExpertBuilder(self.config, self.config.num_layers - 1, seed).build(self.local)
        return prepare(layer, seed, device=self.device)

    def part(self, local: range) -> "Experts":
        """A layer of the experts `local` alone."""
        part = Experts(self.config, self.device, local, [self.counts[e] for e in local])
        part.module.train(self.module.training)
        return part

    def ranks(self, ep: int) -> "list[Experts]":
        """The layers of all expert-parallel ranks."""
        size = self.config.num_experts // ep
        return [self.part(range(rank * size, (rank + 1) * size)) for rank in range(ep)]

    def draw(self, seed: int) -> Tensor:
        return self.random(seed, sum(self.counts))

    def row_name(self, row: Sequence[int]) -> str:
        return row_name(self.counts, row[0], self.local.start)

    def call(self, module: Any, x: Tensor) -> Outputs:
        """A layer that takes an order gets one choice of weight 1 per row. x: rows in expert-major order."""
        counts_E = torch.tensor(self.counts, device=x.device)
        if getattr(module, "takes_order", False):
            ids_M = torch.arange(len(counts_E), device=x.device).repeat_interleave(counts_E)
            order = expert_order(ids_M[:, None], len(counts_E), len(x))
            y_MD = module(x, order, x.new_ones(len(x), 1, dtype=torch.promote_types(x.dtype, torch.float32)))
        else:
            y_MD = module(x, nn.functional.pad(counts_E.cumsum(0), (1, 0)).to(torch.int32))
        return check_like(x, y_MD, self)


def row_name(counts: Sequence[int], row: int, first_expert: int = 0) -> str:
    """Example: counts [3, 2] and row 4 -> "row 1 of expert 1"."""
    expert = 0
    while expert < len(counts) - 1 and row >= counts[expert]:
        row -= counts[expert]
        expert += 1
    return f"row {row} of expert {first_expert + expert}"
