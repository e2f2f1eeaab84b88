"""Experts as a plain Python loop over small MLPs: the baseline for grouped kernels.

    python train.py --experts benchmarks.gpu.loop_experts:LoopExperts

M rows, D model dim, F expert hidden size, E experts on this rank.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_dualpipe.models import ModelConfig


class LoopExperts(nn.Module):
    """Has the parameters and initial weights of the built-in SwiGLU experts and computes the same function."""

    def __init__(self, config: ModelConfig, num_local_experts: int):
        super().__init__()
        self.std, self.out_std = config.init_std, config.residual_std
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, 2 * config.expert_size, config.hidden_size))
        self.down = nn.Parameter(torch.empty(num_local_experts, config.hidden_size, config.expert_size))

    @torch.no_grad()
    def reset_expert(self, e: int) -> None:
        self.gate_up[e].normal_(std=self.std)
        self.down[e].normal_(std=self.out_std)

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        counts_E = expert_offsets.diff().tolist()  # the host needs the sizes: one device sync per layer
        outputs = []
        for rows, gate_up, down in zip(x_MD.split(counts_E), self.gate_up, self.down, strict=True):
            gate, up = F.linear(rows, gate_up).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(outputs)
