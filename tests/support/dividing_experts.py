"""An expert layer with a mistake: it divides by zero in every row."""

import torch
from torch import Tensor, nn


class DividingExperts(nn.Module):
    def __init__(self, config, num_local_experts):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_local_experts, config.hidden_size))

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        return x_MD * self.scale[0] / (x_MD - x_MD).sum(1, keepdim=True)
