"""A gated squared ReLU with a fused Triton activation between two grouped products.

    python examples/layers/fused.py
    python train.py --steps 40 --experts examples/layers/fused.py:FusedExperts

`grouped_linear` runs the products in Triton on a GPU, and defers their weight gradients into pipeline bubbles. In plain
torch, the activation relu(gate)^2 * up reads and writes [M, F] tensors three times. The kernels below do it once, and
save only their input for backward. On a CPU, the same layer runs in plain torch.

M rows, D model dim, F inner width, E experts on this rank.
"""

import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from moe_dualpipe.commands.train import main
from moe_dualpipe.kernels.backend import Kernels, use_triton
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.models import ExpertLayer, ModelConfig

BLOCK: Any = 1024


@triton.jit
def _forward(z_MG, h_MF, F, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate_at = i // F * 2 * F + i % F
    gate = tl.maximum(tl.load(z_MG + gate_at, i < size, 0.0).to(tl.float32), 0.0)
    up = tl.load(z_MG + gate_at + F, i < size, 0.0).to(tl.float32)
    tl.store(h_MF + i, gate * gate * up, i < size)


@triton.jit
def _backward(z_MG, dh_MF, dz_MG, F, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate_at = i // F * 2 * F + i % F
    gate = tl.maximum(tl.load(z_MG + gate_at, i < size, 0.0).to(tl.float32), 0.0)
    up = tl.load(z_MG + gate_at + F, i < size, 0.0).to(tl.float32)
    dh = tl.load(dh_MF + i, i < size, 0.0).to(tl.float32)
    tl.store(dz_MG + gate_at, dh * 2 * gate * up, i < size)
    tl.store(dz_MG + gate_at + F, dh * gate * gate, i < size)


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z_MG: Tensor) -> Tensor:
        ctx.save_for_backward(z_MG)
        h_MF = z_MG.new_empty(len(z_MG), z_MG.shape[1] // 2)
        if h_MF.numel():
            _forward[triton.cdiv(h_MF.numel(), BLOCK),](z_MG, h_MF, h_MF.shape[1], h_MF.numel(), BLOCK)
        return h_MF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (z_MG,), dh_MF = ctx.saved_tensors, grads[0].contiguous()
        dz_MG = torch.empty_like(z_MG)
        if dh_MF.numel():
            _backward[triton.cdiv(dh_MF.numel(), BLOCK),](z_MG, dh_MF, dz_MG, dh_MF.shape[1], dh_MF.numel(), BLOCK)
        return dz_MG


def gated_squared_relu(z_MG: Tensor, kernels: Kernels) -> Tensor:
    """relu(gate)^2 * up, [M, F] from [M, 2F]; the first half of a row is the gate."""
    if use_triton(kernels, z_MG):
        return _Activation.apply(z_MG)  # type: ignore[return-value]
    gate_MF, up_MF = z_MG.chunk(2, dim=-1)
    return gate_MF.relu().square() * up_MF


class FusedExperts(ExpertLayer):
    def __init__(self, config: ModelConfig, num_local_experts: int):
        super().__init__()
        width, inner = config.hidden_size, config.expert_size
        self.gate_up = nn.Parameter(torch.randn(num_local_experts, 2 * inner, width) * config.init_std)
        self.down = nn.Parameter(torch.randn(num_local_experts, width, inner) * config.residual_std)
        self.stacked = {"gate_up": (inner, inner)}  # Muon treats the two matrices separately

    def forward(self, x_MD: Tensor, expert_offsets: Tensor) -> Tensor:
        options = {"weight_grads": self.weight_grads, "kernels": self.kernels}
        z_MG = grouped_linear(x_MD, self.gate_up, expert_offsets, **options)
        return grouped_linear(gated_squared_relu(z_MG, self.kernels), self.down, expert_offsets, **options)


if __name__ == "__main__":
    options = ["--steps", "40", "--seq-len", "128", "--batch-size", "8"]
    main(["--experts", f"{__file__}:FusedExperts", *options, *sys.argv[1:]])
