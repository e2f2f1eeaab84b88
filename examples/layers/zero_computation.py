"""MoE++ (arXiv 2410.07348): some experts compute almost nothing: zero, copy and constant experts.

    python examples/layers/zero_computation.py
    python train.py --steps 40 --experts examples/layers/zero_computation.py:expert --set model.expert_options.zeros=2

The function `expert` returns the module of the expert with this id. The special experts have the last ids. A token that
chooses one of them needs less computation. In the paper, every rank has a copy of the special experts. Here, each is on
one rank, so its rows are sent like those of any expert.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_dualpipe.commands.train import main
from moe_dualpipe.models import ModelConfig


@dataclass
class Special:
    zeros: int = 1
    """Number of experts that return 0."""
    copies: int = 1
    """Number of experts that return their input."""
    constants: int = 1
    """Number of experts that return a mean of their input and a learned vector."""


class Zero(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return rows * 0


class Constant(nn.Module):
    """a x + (1 - a) v, where a = sigmoid(gate x)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, 1, bias=False)
        self.v = nn.Parameter(torch.randn(config.hidden_size) * config.init_std)

    def forward(self, rows: Tensor) -> Tensor:
        return torch.lerp(self.v.expand_as(rows), rows, self.gate(rows).sigmoid())


def expert(config: ModelConfig, expert_id: int, options: Special) -> nn.Module:
    special = [Zero() for _ in range(options.zeros)] + [nn.Identity() for _ in range(options.copies)]
    special += [Constant(config) for _ in range(options.constants)]
    first = config.num_experts - len(special)
    if expert_id >= first:
        return special[expert_id - first]
    width, inner = config.hidden_size, config.expert_size
    return nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, width))


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--experts", f"{__file__}:expert", *options, *sys.argv[1:]])
