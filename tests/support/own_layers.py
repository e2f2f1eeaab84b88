"""Custom layers in every form, each equal to a layer of this package or to another form."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from moe_dualpipe.kernels.experts import swiglu
from moe_dualpipe.models import MoE, attach, expert_function
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.overlap import Compute, Segmented


@dataclass
class Widths:
    factor: float = 1.0
    widths: tuple[int, ...] = (4, 8)
    bias: bool = False


class Expert(nn.Module):
    """One SwiGLU expert."""

    def __init__(self, config, hidden=6):
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, config.hidden_size, bias=False)

    def forward(self, rows):
        return self.down(swiglu(self.gate_up(rows)))


class VariedExpert(nn.Sequential):
    """One expert of the width that its id and its options give."""

    def __init__(self, config, expert_id, layer, options: Widths):
        width = options.widths[expert_id % len(options.widths)]
        super().__init__(nn.Linear(config.hidden_size, width, options.bias), nn.Linear(width, config.hidden_size))
        self.place, self.factor = (layer, expert_id), options.factor

    def forward(self, rows):
        return self.factor * super().forward(rows)


def expert_list(config, num_local_experts):
    return nn.ModuleList(Expert(config) for _ in range(num_local_experts))


class ExpertList(nn.ModuleList):
    def __init__(self, config, num_local_experts):
        super().__init__(Expert(config) for _ in range(num_local_experts))


@expert_function(gate_up=(12, "hidden_size"), down=("hidden_size", 6))
def swiglu_function(rows, gate_up, down):
    return F.linear(swiglu(F.linear(rows, gate_up)), down)


class PlainRouter(nn.Module):
    """Top-k of a softmax, with a loss of its own."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer, self.k = layer, config.experts_per_token
        self.score = nn.Linear(config.hidden_size, config.num_experts)
        self.moved = []

    def forward(self, x):
        logits_TE = self.score(x.flatten(0, -2)).float()
        weights, ids = logits_TE.softmax(-1).topk(self.k)
        return attach(weights, 0.01 * logits_TE.square().mean()), ids

    def move_bias(self, load_E, rate):
        self.moved.append((load_E.tolist(), rate))


class WithoutCache(nn.Module):
    """The built-in attention, but its forward takes neither a cache nor a mask."""

    def __init__(self, config):
        super().__init__()
        self.inner = Attention(config)

    def forward(self, x_BSD):
        return self.inner(x_BSD)


class WithCache(WithoutCache):
    def __init__(self, config, layer):
        super().__init__(config)
        self.inner = Attention(config, layer)

    def forward(self, x_BSD, mask_B1SS=None, cache=None):
        return self.inner(x_BSD, cache, mask_B1SS)


class ParallelBlock(Segmented):
    """Attention and experts both read the block's input, so attention hides the dispatch."""

    def __init__(self, config, layer, expert_parallel, stage_options):
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size)
        self.attention = Attention(config, layer)
        self.moe = MoE(config, expert_parallel, layer, stage_options)

    def segments(self, x_BSD):
        y_BSD, *routed = yield Compute("attn", self.route, x_BSD)
        parts = yield from self.moe.exchange(*routed)
        return (yield Compute("add", self.add, y_BSD, *parts))

    def route(self, x_BSD):
        normal = self.norm(x_BSD)
        return x_BSD + self.attention(normal), *self.moe.route(normal)

    def add(self, y_BSD, *parts):
        return y_BSD + torch.stack(parts).sum(0).view_as(y_BSD)


class PlainBlock(nn.Module):
    """A block without segments and without experts."""

    def __init__(self, config, layer, expert_parallel, stage_options, options: Widths):
        super().__init__()
        self.inner, self.factor = Attention(config, layer), options.factor

    def forward(self, x_BSD):
        return x_BSD + self.factor * self.inner(x_BSD)
