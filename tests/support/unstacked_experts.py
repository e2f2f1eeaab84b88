"""An expert layer that does not stack its experts' weights."""

import torch
from torch import nn


class UnstackedExperts(nn.Module):
    """A custom expert layer: one linear layer per expert, in separate parameters."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        width = config.hidden_size
        self.each = nn.ModuleList(nn.Linear(width, width) for _ in range(num_local_experts))

    def forward(self, x_MD, expert_offsets):
        pieces = x_MD.split(expert_offsets.diff().tolist())
        return torch.cat([expert(piece) for expert, piece in zip(self.each, pieces, strict=True)])
