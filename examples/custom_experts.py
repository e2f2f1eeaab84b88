"""Train with a custom expert layer: experts with a squared ReLU instead of SwiGLU.

    python examples/custom_experts.py --steps 100
    torchrun --nproc-per-node 2 train.py --model.experts examples.custom_experts:SquaredReLUExperts

An expert layer is an nn.Module that maps rows sorted by expert to rows. Parameters that stack the experts along their
first dimension are saved expert by expert, so that a checkpoint can be loaded with any number of ranks.

M rows, D model dim, F inner width, E experts on this rank.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.models import ModelConfig
from moe_dualpipe.training.main import main


class SquaredReLUExperts(nn.Module):
    """down relu(up x)^2 (arXiv 2109.08668)."""

    def __init__(self, config: ModelConfig, num_local_experts: int):
        super().__init__()
        inner = config.expert_size * 3 // 2  # the same number of parameters as SwiGLU's three matrices
        self.up = nn.Parameter(torch.randn(num_local_experts, inner, config.hidden_size) * config.init_std)
        self.down = nn.Parameter(torch.randn(num_local_experts, config.hidden_size, inner) * config.init_std)
        self.weight_grads = None  # set by the pipeline, which may defer weight gradients
        self.kernels = "auto"  # set by the model: Triton or plain torch

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        """The rows of expert e are x_MD[expert_offsets[e] : expert_offsets[e + 1]]."""
        options = {"weight_grads": self.weight_grads, "kernels": self.kernels}
        hidden_MF = F.relu(grouped_linear(x_MD, self.up, expert_offsets, **options)).square()
        return grouped_linear(hidden_MF, self.down, expert_offsets, **options)


if __name__ == "__main__":
    main(["--model.experts", "custom_experts:SquaredReLUExperts", *sys.argv[1:]])
