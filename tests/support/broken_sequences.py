"""Attention and blocks with one mistake each."""

import torch
from torch import nn
from torch.nn import functional as F

from moe_dualpipe.models.attention import Attention
from tests.support.own_layers import ParallelBlock, WithCache, WithoutCache


class SeesTheFuture(WithoutCache):
    def forward(self, x_BSD):
        mask_SS = x_BSD.new_ones(2 * x_BSD.shape[:2][1:], dtype=torch.bool)
        return self.inner(x_BSD, mask_B1SS=mask_SS)


class CountsTheLength(WithoutCache):
    def forward(self, x_BSD):
        return self.inner(x_BSD) / x_BSD.shape[1]


class MixesSequences(WithoutCache):
    def forward(self, x_BSD):
        return self.inner(x_BSD - x_BSD.mean(0))


class ForgetsThePast(WithCache):
    def forward(self, x_BSD, cache=None):
        return self.inner(x_BSD)


class IgnoresTheMask(WithCache):
    def forward(self, x_BSD, mask_B1SS=None, cache=None):
        return self.inner(x_BSD, cache)


class UsesTheMaskBothWays(WithCache):
    def forward(self, x_BSD, mask_B1SS=None, cache=None):
        return self.inner(x_BSD, cache, None if mask_B1SS is None else mask_B1SS | mask_B1SS.mT)


class NeedsTwoPositions(WithoutCache):
    def forward(self, x_BSD):
        return self.inner(x_BSD) + 0 * x_BSD[:, 1:2]


class DropsAPosition(WithoutCache):
    def forward(self, x_BSD):
        return self.inner(x_BSD)[:, 1:]


class NormalizesOnAverage(nn.Module):
    """A running mean, which each call moves."""

    def __init__(self, config):
        super().__init__()
        self.inner = Attention(config)
        self.norm = nn.BatchNorm1d(config.hidden_size, affine=False)

    def forward(self, x_BSD):
        self.norm(x_BSD.flatten(0, 1))
        return self.inner(x_BSD) - self.norm.running_mean.to(x_BSD)


class NeverTrains(WithoutCache):
    def __init__(self, config):
        super().__init__(config)
        self.gate = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x_BSD):
        return self.inner(x_BSD) * self.gate.data


class WithDropout(WithoutCache):
    """Correct: its random numbers are drawn in training only."""

    def forward(self, x_BSD):
        return F.dropout(self.inner(x_BSD), 0.5, self.training)


class AddsTwiceInPlace(ParallelBlock):
    def route(self, x_BSD):
        normal = self.norm(x_BSD)
        with torch.no_grad():
            x_BSD += 1
        return x_BSD + self.attention(normal), *self.moe.route(normal)


class CutsOffTheResidual(ParallelBlock):
    def add(self, y_BSD, *parts):
        return y_BSD.detach() + torch.stack(parts).sum(0).view_as(y_BSD)


class KeepsItsAttention(ParallelBlock):
    """Between segments, another micro-batch overwrites it."""

    def route(self, x_BSD):
        normal = self.norm(x_BSD)
        self.kept = x_BSD + self.attention(normal)
        return self.kept, *self.moe.route(normal)

    def add(self, y_BSD, *parts):
        return self.kept.detach() + (y_BSD - y_BSD.detach()) + torch.stack(parts).sum(0).view_as(y_BSD)
