"""Expert layers that train without a word, or fail late, each with one mistake.

`GELUExperts`, `SharesAScale` and `RoundsToFp32` are correct.
"""

import torch
from torch import nn
from torch.nn import functional as F


class GELUExperts(nn.Module):
    def __init__(self, config, num_local_experts):
        super().__init__()
        self.num_experts, self.is_part = num_local_experts, num_local_experts < config.num_experts
        self.up = nn.Parameter(0.3 * torch.randn(num_local_experts, config.expert_size, config.hidden_size))
        self.down = nn.Parameter(0.3 * torch.randn(num_local_experts, config.hidden_size, config.expert_size))

    def forward(self, x_MD, expert_offsets):
        ends = expert_offsets.tolist()
        outputs = [self.expert(e, x_MD[ends[e] : ends[e + 1]]) for e in range(self.num_experts)]
        return torch.cat(outputs)

    def expert(self, e, rows):
        return F.linear(F.gelu(F.linear(rows, self.up[e])), self.down[e])


class SharesAScale(GELUExperts):
    """Correct: all experts of a rank share the scale."""

    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        self.scale = nn.Parameter(torch.ones(config.hidden_size))

    def expert(self, e, rows):
        return super().expert(e, rows * self.scale)


class RoundsToFp32(GELUExperts):
    """Correct: it computes in fp32 whatever the dtype of its input."""

    def expert(self, e, rows):
        return super().expert(e, rows).float().to(rows.dtype)


class OnlyManyExperts(GELUExperts):
    def __init__(self, config, num_local_experts):
        if num_local_experts < 2:
            raise RuntimeError("this layer needs two experts")
        super().__init__(config, num_local_experts)


class NeedsAllExpertsOrOne(GELUExperts):
    def __init__(self, config, num_local_experts):
        if num_local_experts not in (1, config.num_experts):
            raise RuntimeError("this layer cannot be divided")
        super().__init__(config, num_local_experts)


class ReturnsATuple(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD, expert_offsets), None


class ReturnsFp32(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD, expert_offsets).float()


class ReturnsFp32InBf16(GELUExperts):
    """Scales in fp32: the result of bf16 rows is fp32, too."""

    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD, expert_offsets) * torch.ones(1)


class OverflowsInFp32(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD, expert_offsets) * 1e60 / 1e60


class ChangesItsInput(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        with torch.no_grad():
            x_MD *= 2
        return super().forward(x_MD, expert_offsets)


class AddsNoise(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD + 0.01 * torch.randn_like(x_MD), expert_offsets)


class CountsCalls(GELUExperts):
    calls = 0

    def forward(self, x_MD, expert_offsets):
        self.calls += 1
        return super().forward(x_MD, expert_offsets) / self.calls


class RemembersTheFirstInput(GELUExperts):
    scale = None

    def forward(self, x_MD, expert_offsets):
        if self.scale is None:
            self.scale = x_MD.detach().std()
        return super().forward(x_MD, expert_offsets) / self.scale


class ForgetsTheLastExpert(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        bounds, y_MD = expert_offsets.tolist(), torch.zeros_like(x_MD)
        for e in range(len(bounds) - 2):
            y_MD[bounds[e] : bounds[e + 1]] = self.expert(e, x_MD[bounds[e] : bounds[e + 1]])
        return y_MD + 0 * x_MD


class HasACapacity(GELUExperts):
    def expert(self, e, rows):
        return torch.cat([super().expert(e, rows[:4]), 0 * rows[4:]])


class HasALargeCapacity(GELUExperts):
    """Few rows never reach it."""

    def expert(self, e, rows):
        return torch.cat([super().expert(e, rows[:6]), 0 * rows[6:]])


class SubtractsTheMean(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD - x_MD.mean(0), expert_offsets)


class DependsOnThePosition(GELUExperts):
    def expert(self, e, rows):
        return super().expert(e, rows) * torch.linspace(1, 2, 9, dtype=rows.dtype)[: len(rows), None]


class NeedsARow(GELUExperts):
    def expert(self, e, rows):
        return super().expert(e, rows) * (1 + 0 * rows.max())


class NeedsSomeRows(GELUExperts):
    """Skips experts without rows, and then has nothing to concatenate."""

    def forward(self, x_MD, expert_offsets):
        ends = expert_offsets.tolist()
        pieces = [(e, x_MD[ends[e] : ends[e + 1]]) for e in range(self.num_experts)]
        return torch.cat([self.expert(e, rows) for e, rows in pieces if len(rows)])


class UsesTheNextExpert(GELUExperts):
    def expert(self, e, rows):
        return super().expert((e + 1) % self.num_experts, rows)


class HoldsAllExperts(GELUExperts):
    def __init__(self, config, num_local_experts):
        super().__init__(config, config.num_experts)
        self.num_experts = num_local_experts


class PlainTensor(GELUExperts):
    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        self.scale = [1 + torch.rand(config.hidden_size) for _ in range(num_local_experts)]

    def expert(self, e, rows):
        return super().expert(e, rows) * self.scale[e].to(rows)


class _WithReset(GELUExperts):
    """Draws the weights of each expert, so the constructor's shapes are not compared when it is built."""

    def reset_expert(self, e):
        for parameter in self.parameters():
            nn.init.normal_(parameter[e], std=0.3)


class HasABiasOnTwoRanks(_WithReset):
    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        if self.is_part:
            self.bias = nn.Parameter(torch.zeros(num_local_experts, config.hidden_size))

    def expert(self, e, rows):
        return super().expert(e, rows) + (self.bias[e] if self.is_part else 0)


class IsWiderOnTwoRanks(_WithReset):
    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        width = 12 * config.num_experts // num_local_experts
        self.up = nn.Parameter(torch.empty(num_local_experts, width, config.hidden_size))
        self.down = nn.Parameter(torch.empty(num_local_experts, config.hidden_size, width))


class CutsOffAWeight(GELUExperts):
    def expert(self, e, rows):
        return F.linear(F.gelu(F.linear(rows, self.up[e])), self.down[e].detach())


class HasAnUnusedWeight(GELUExperts):
    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        self.bias = nn.Parameter(torch.zeros(num_local_experts, config.hidden_size))


class TrainsOneExpertLess(GELUExperts):
    def expert(self, e, rows):
        up, down = (weight[e].detach() if e == 2 else weight[e] for weight in (self.up, self.down))
        return F.linear(F.gelu(F.linear(rows, up)), down)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):  # noqa: ARG004
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):  # noqa: ARG004
        return 2 * grad


class DoublesAGradient(GELUExperts):
    def expert(self, e, rows):
        return F.linear(F.gelu(F.linear(rows, self.up[e])), _Doubled.apply(self.down[e]))


class CutsOffTheInput(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        return super().forward(x_MD.detach(), expert_offsets)


class DoublesAGradientInParts(GELUExperts):
    def expert(self, e, rows):
        down = _Doubled.apply(self.down[e]) if self.is_part else self.down[e]
        return F.linear(F.gelu(F.linear(rows, self.up[e])), down)


class DoublesTheInputGradientInParts(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        return super().forward(_Doubled.apply(x_MD) if self.is_part else x_MD, expert_offsets)


class _Scale(torch.autograd.Function):
    """x * weight. The gradient of the weight is deferred, and also returned."""

    @staticmethod
    def forward(ctx, x, weight, weight_grads):
        ctx.save_for_backward(x, weight)
        ctx.weight_grads = weight_grads
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        if ctx.weight_grads is not None and ctx.weight_grads.defers(weight):
            ctx.weight_grads.defer(weight, lambda: (x * grad).sum(0))
        return grad * weight, (x * grad).sum(0), None


class DefersTwice(nn.ModuleList):
    def __init__(self, config, num_local_experts):
        super().__init__(ScaleOfOneExpert(config) for _ in range(num_local_experts))


class ScaleOfOneExpert(nn.Module):
    weight_grads = None

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(config.hidden_size))

    def forward(self, rows):
        return _Scale.apply(rows, self.weight, self.weight_grads)


class _Square(torch.autograd.Function):
    """Squares x, and keeps it in the layer."""

    @staticmethod
    def forward(ctx, x, layer):
        layer.kept = x
        ctx.layer = layer
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.layer.kept, None


class KeepsItsInput(GELUExperts):
    def forward(self, x_MD, expert_offsets):
        return super().forward(_Square.apply(x_MD, self), expert_offsets)


class IgnoresTheWeights(GELUExperts):
    takes_order = True

    def forward(self, x_ND, order, weights_NK):
        rows_MD = x_ND[order.gather_idx_M]
        y_MD = super().forward(rows_MD, order.expert_offsets)
        return torch.zeros_like(x_ND).index_add(0, order.gather_idx_M, y_MD) + 0 * weights_NK.sum()


class DetachesTheWeights(GELUExperts):
    """The weights of the router get a gradient of 0."""

    takes_order = True

    def forward(self, x_ND, order, weights_NK):
        y_MD = super().forward(x_ND[order.gather_idx_M], order.expert_offsets)
        y_MD = y_MD * weights_NK.detach().flatten()[order.choice_idx_M, None].to(y_MD)
        return torch.zeros_like(x_ND).index_add(0, order.gather_idx_M, y_MD) + 0 * weights_NK.sum()
