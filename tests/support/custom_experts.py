"""Custom expert layers: parameters that are stacked, in lists, or shared, with and without `reset_expert`."""

import torch
from torch import nn


class Stacked(nn.Module):
    """Stacks its experts, and knows nothing about ids. The width of `bias` may equal the number of experts."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        width = config.hidden_size
        self.scale = nn.Parameter(torch.randn(1))
        self.up = nn.Parameter(torch.randn(num_local_experts, width, width) * 0.1)
        self.bias = nn.Parameter(torch.randn(width))
        self.register_buffer("shift", torch.randn(num_local_experts))

    def forward(self, x_MD, expert_offsets):
        pieces = x_MD.split(expert_offsets.diff().tolist())
        outs = [piece @ up * self.scale + shift for piece, up, shift in zip(pieces, self.up, self.shift, strict=True)]
        return torch.cat(outs) + self.bias


class WithReset(Stacked):
    @torch.no_grad()
    def reset_expert(self, e):
        self.up[e].normal_(std=0.1)
        self.shift[e].normal_()


class Listed(nn.Module):
    """One module per expert; experts 0 and 1 have no weights. For tests that build it only."""

    def __init__(self, config, num_local_experts, *, expert_ids, layer):
        super().__init__()
        assert len(expert_ids) == num_local_experts
        assert layer > 0
        width = config.hidden_size
        self.each = nn.ModuleList(nn.Identity() if e < 2 else nn.Linear(width, width) for e in expert_ids)


class ListsOfStacks(nn.Module):
    """A list of two layers that stack the experts: with two local experts, the list has as many entries as these."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.stages = nn.ModuleList(Stack(num_local_experts, config.hidden_size) for _ in range(2))

    def forward(self, x_MD, expert_offsets):
        first, second = self.stages
        return second(first(x_MD, expert_offsets).relu(), expert_offsets)


class Stack(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(number, width, width) * 0.1)

    def forward(self, x_MD, expert_offsets):
        pieces = x_MD.split(expert_offsets.diff().tolist())
        return torch.cat([piece @ weight for piece, weight in zip(pieces, self.weight, strict=True)])


class FailsFor2(ListsOfStacks):
    """Cannot be built for expert 2."""

    def __init__(self, config, num_local_experts, expert_ids):
        super().__init__(config, num_local_experts)
        if expert_ids == range(2, 3):
            del self.stages[1]
