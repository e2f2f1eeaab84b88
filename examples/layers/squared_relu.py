"""Experts with a squared ReLU (arXiv 2109.08668) instead of SwiGLU: a whole layer of experts in a dozen lines.

    python examples/layers/squared_relu.py
    torchrun --nproc-per-node 2 train.py --experts examples/layers/squared_relu.py:SquaredReLUExperts

`grouped_linear` multiplies the rows of all experts by their weights at once. The parameters stack the experts along
their first dimension, so each expert is saved separately and loads on any number of ranks.

M rows, D model dim, F inner width, E experts on this rank.
"""

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.commands.train import main
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.models import ExpertLayer, ModelConfig


class SquaredReLUExperts(ExpertLayer):
    """down relu(up x)^2"""

    def __init__(self, config: ModelConfig, num_local_experts: int):
        super().__init__()
        inner = config.expert_size * 3 // 2  # the same number of parameters as SwiGLU's three matrices
        self.up = nn.Parameter(torch.randn(num_local_experts, inner, config.hidden_size) * config.init_std)
        self.down = nn.Parameter(torch.randn(num_local_experts, config.hidden_size, inner) * config.residual_std)

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        options = {"weight_grads": self.weight_grads, "kernels": self.kernels}
        hidden_MF = F.relu(grouped_linear(x_MD, self.up, expert_offsets, **options)).square()
        return grouped_linear(hidden_MF, self.down, expert_offsets, **options)


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--experts", f"{__file__}:SquaredReLUExperts", *options, *sys.argv[1:]])
