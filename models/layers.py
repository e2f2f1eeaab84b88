"""The two building blocks that every part of the model shares: a linear layer, and the SwiGLU MLP made of it.

D model dim, F inner width, ...: any leading dimensions.
"""

import torch
from torch import Tensor, nn

from moe_dualpipe.kernels.experts import swiglu
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.weight_grads import WeightGrads


class Linear(nn.Module):
    """y = x W^T without a bias, whose weight gradient can be deferred (`weight_grads`, set by the pipeline)."""

    def __init__(self, in_features: int, out_features: int, std: float):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features).normal_(std=std))
        self.weight_grads: WeightGrads | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.weight_grads)


class SwiGLU(nn.Module):
    """down(silu(gate x) * up x), arXiv 2002.05202; gate and up are one product."""

    def __init__(self, hidden_size: int, inner_size: int, std: float, out_std: float):
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * inner_size, std)
        self.stacked = {"gate_up.weight": (inner_size, inner_size)}
        self.down = Linear(inner_size, hidden_size, out_std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate_up(x)))


def at_least_fp32(x: Tensor) -> Tensor:
    """Scores, angles and losses are computed in fp32 where the model is narrower, and in fp64 where it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
