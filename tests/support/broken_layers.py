"""Layers with a mistake each. A comment with the name of the class marks the line that an error must name."""

import torch
from torch import nn

from moe_dualpipe.models import expert_function
from moe_dualpipe.overlap import Compute


class Sound(nn.Module):
    """Experts without a mistake, to derive from."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.up = nn.Parameter(torch.ones(num_local_experts, config.hidden_size))

    def forward(self, x_MD, expert_offsets):
        return x_MD * self.up.sum(0)


class Product(Sound):
    def forward(self, x_MD, expert_offsets):
        return x_MD @ torch.zeros(3, 3)  # Product


class Inner(Sound):
    def forward(self, x_MD, expert_offsets):
        return scaled(super().forward(x_MD, expert_offsets))


def scaled(_x):
    raise KeyError("scale")  # Inner


class Double(Sound):
    def forward(self, x_MD, expert_offsets):  # Double
        return super().forward(x_MD, expert_offsets).double()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, grad):
        raise RuntimeError(f"no gradient of {[*grad.shape][1:]}")  # InBackward


class InBackward(Sound):
    def forward(self, x_MD, expert_offsets):
        return _Fails.apply(super().forward(x_MD, expert_offsets))


class Reset(Sound):
    def reset_expert(self, e):
        self.down[e].zero_()  # Reset


@expert_function(up=("hidden_size", "hidden_size"))
def function_fails(rows, up):
    return rows @ up[1:]  # function_fails


class SoundRouter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.scores = nn.Linear(config.hidden_size, config.num_experts)

    def forward(self, x):
        return self.scores(x.flatten(0, -2)).softmax(-1).topk(2)


class FewTokens(SoundRouter):
    def forward(self, x):  # FewTokens
        weights, ids = super().forward(x)
        return weights[1:], ids[1:]


class SoundAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.values = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BSD):
        return self.values(x_BSD)


class AttentionFlattens(SoundAttention):
    def forward(self, x_BSD):  # AttentionFlattens
        return self.values(x_BSD).flatten(0, 1)


class SoundBlock(nn.Module):
    def __init__(self, config, layer, expert_parallel, stage_options):
        super().__init__()
        self.mlp = nn.Linear(config.hidden_size, config.hidden_size)
        self.wrong = nn.Linear(3, 3)


class BlockFails(SoundBlock):
    def segments(self, x_BSD):
        yield Compute("mlp", self.mlp, x_BSD)
        raise IndexError("between two segments")  # BlockFails


class ForwardOfBlock(SoundBlock):
    def forward(self, x_BSD):  # ForwardOfBlock
        return [self.mlp(x_BSD)]
