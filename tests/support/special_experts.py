"""Expert layers with dropout, frozen weights or buffers, to train as custom expert layers.

M rows, D model dim, F inner width, R rank, E experts on this rank.
"""

import torch
from torch import nn
from torch.nn import functional as F

from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.kernels.permute import permute, unpermute
from moe_dualpipe.models.experts import SwiGLUExperts


def named(layer):
    """The name of an expert layer of this file, for `ModelConfig.experts`."""
    return f"{layer.__module__}:{layer.__name__}"


class DropoutExperts(SwiGLUExperts):
    def forward(self, x_ND, order, weights_NK):
        return F.dropout(super().forward(x_ND, order, weights_NK), 0.5, self.training)


class LowRankExperts(nn.Module):
    """down relu(up x + b a x): `up` and `down` are frozen, `a` [E, R, D] and `b` [E, F, R] are trained."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        outer, inner, rank = config.hidden_size, config.expert_size, 3

        def draw(*shape, trained):
            return nn.Parameter(torch.empty(num_local_experts, *shape), requires_grad=trained)

        self.up, self.down = draw(inner, outer, trained=False), draw(outer, inner, trained=False)
        self.a, self.b = draw(rank, outer, trained=True), draw(inner, rank, trained=True)
        self.weight_grads, self.kernels = None, "auto"

    @torch.no_grad()
    def reset_expert(self, e):
        for parameter in self.parameters():
            parameter[e].normal_(std=0.2)

    def forward(self, x_MD, expert_offsets):
        options = {"weight_grads": self.weight_grads, "kernels": self.kernels}
        low_MR = grouped_linear(x_MD, self.a, expert_offsets, **options)
        up_MF = grouped_linear(x_MD, self.up, expert_offsets, **options)
        hidden_MF = F.relu(up_MF + grouped_linear(low_MR, self.b, expert_offsets, **options))
        return grouped_linear(hidden_MF, self.down, expert_offsets, **options)


class AdapterExperts(SwiGLUExperts):
    """Frozen SwiGLU experts plus a trained low-rank product each, which is zero at first."""

    def __init__(self, config, num_local_experts):
        super().__init__(config, num_local_experts)
        self.gate_up.requires_grad_(False)
        self.down.requires_grad_(False)
        width = config.hidden_size
        self.adapters = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False))
            for _ in range(num_local_experts)
        )

    @torch.no_grad()
    def reset_expert(self, e):
        super().reset_expert(e)
        down, up = self.adapters[e]  # type: ignore[misc]
        down.weight.normal_(std=0.2)
        up.weight.zero_()

    def forward(self, x_ND, order, weights_NK):
        rows = permute(x_ND, order).split(order.expert_offsets.diff().tolist())
        adapted = torch.cat([adapter(piece) for adapter, piece in zip(self.adapters, rows, strict=True)])
        return super().forward(x_ND, order, weights_NK) + unpermute(adapted, order, weights_NK)


class ScaledExperts(nn.Module):
    """Scales each expert's rows by a fixed buffer [E, D], drawn at the start. With dropout."""

    scale: torch.Tensor

    def __init__(self, config, num_local_experts):
        super().__init__()
        width = config.hidden_size
        self.up = nn.Parameter(torch.empty(num_local_experts, width, width))
        self.register_buffer("scale", torch.ones(num_local_experts, width))
        self.register_buffer("scratch", torch.zeros(num_local_experts), persistent=False)

    @torch.no_grad()
    def reset_expert(self, e):
        self.up[e].normal_(std=0.2)
        self.scale[e].normal_()

    def forward(self, x_MD, expert_offsets):
        self.scratch = self.scratch + 1
        rows_MD = x_MD * self.scale.repeat_interleave(expert_offsets.diff(), 0)
        return F.dropout(grouped_linear(rows_MD, self.up, expert_offsets), 0.1, self.training)


class RunningExperts(ScaledExperts):
    """Replaces the scale by a running one."""

    def forward(self, x_MD, expert_offsets):
        y_MD = super().forward(x_MD, expert_offsets)
        if self.training and len(x_MD):
            self.scale = self.scale.lerp(x_MD.detach().std(0), 0.1)  # a new tensor
        return y_MD
