"""Layers with a mistake each. A comment with the name of the class marks the line that an error must name."""

import torch

from moe_dualpipe.models import expert_function
from moe_dualpipe.overlap import Compute

from .custom_experts import Stacked
from .own_layers import ParallelBlock, PlainBlock, PlainRouter, WithoutCache


class Product(Stacked):
    def forward(self, x_MD, expert_offsets):
        return x_MD @ torch.zeros(3, 3)  # Product


class Inner(Stacked):
    def forward(self, x_MD, expert_offsets):
        return scaled(super().forward(x_MD, expert_offsets))


def scaled(_x):
    raise KeyError("scale")  # Inner


class Double(Stacked):
    def forward(self, x_MD, expert_offsets):  # Double
        return super().forward(x_MD, expert_offsets).double()


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(_ctx, x):
        return x * 2

    @staticmethod
    def backward(_ctx, grad):
        raise RuntimeError(f"no gradient of {[*grad.shape][1:]}")  # InBackward


class InBackward(Stacked):
    def forward(self, x_MD, expert_offsets):
        return _Fails.apply(super().forward(x_MD, expert_offsets))


class Reset(Stacked):
    def reset_expert(self, e):
        self.down[e].zero_()  # Reset


@expert_function(up=("hidden_size", "hidden_size"))
def function_fails(rows, up):
    return rows @ up[1:]  # function_fails


class FewTokens(PlainRouter):
    def forward(self, x):  # FewTokens
        weights, ids = super().forward(x)
        return weights[1:], ids[1:]


class AttentionFlattens(WithoutCache):
    def forward(self, x_BSD):  # AttentionFlattens
        return super().forward(x_BSD).flatten(0, 1)


class BlockFails(ParallelBlock):
    def segments(self, x_BSD):
        yield Compute("attn", self.attention, x_BSD)
        raise IndexError("between two segments")  # BlockFails


class ForwardOfBlock(PlainBlock):
    def forward(self, x_BSD):  # ForwardOfBlock
        return [super().forward(x_BSD)]
