"""`experts` in FP8: forward and input gradients multiply 8-bit numbers, weight gradients those in the model's dtype.

    forward   z = up(x8[gather_idx]);   h = swiglu(z);   y = sum over k of w down(h8)[positions]
    backward  dh = down^T(dy8[gather_idx]);   dz, dw = backward of SwiGLU;   dx = sum over k of up^T(dz8)[positions]
              d down = dy[gather_idx]^T (w h);   d up = dz^T x8[gather_idx]       (can be deferred)

An 8 marks what is rounded to 8 bits (fp8.py). Weights are rounded, too; z, dz and the results are in the model's dtype.
Backward needs x in 8 bits with its scales, and z. A weight gradient sums over rows, so 8-bit operands would need blocks
along another dimension, and its errors would add up in the weights, step after step: it multiplies numbers in the
model's dtype.

In plain torch, a product reads the 8-bit numbers, multiplies in fp32, and rounds once. The Triton kernels are in
gpu/fp8.py. SwiGLU is in plain torch on all devices.

N rows, K choices per row, M choices in expert-major order, E experts, D model dim, F inner width, G = 2F.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .backend import check_contiguous_rows, forbid_double_backward
from .fp8 import Fp8Matrix, Fp8Recipe
from .grouped_gemm import GroupedGemmOptions, _grouped_mm_reference, _grouped_wgrad
from .linear import compute_or_defer, grad_dtype
from .order import ExpertOrder
from .permute import gather_sum


class _Products:
    """Rounds rows, and multiplies them with the weights of their experts, in Triton or in plain torch."""

    def __init__(self, order: ExpertOrder, recipe: Fp8Recipe, num_sms: int | None, triton: bool):
        self.recipe, self.offsets, self.num_sms, self.tiling = recipe, order.expert_offsets, num_sms, None
        if triton:
            from .gpu.tiles import Tiling

            self.tiling = Tiling(order.expert_offsets, len(order.gather_idx_M), dict(order.tile_tables))

    def round_rows(self, x_RC: Tensor) -> Fp8Matrix:
        if self.tiling is None:
            return self.recipe.quantize_rows(x_RC)
        from .gpu.fp8 import quantize_rows

        return Fp8Matrix(*quantize_rows(check_contiguous_rows("rows", x_RC), self.recipe.power_of_two), 1, 128)

    def multiply(self, x_NI: Fp8Matrix, w_EOI: Tensor, dtype: torch.dtype, index_M: Tensor | None = None) -> Tensor:
        """y[m] = W[e] x[m] for the rows m of each expert e: [M, O]. index_M: the row of x for each m."""
        w = self.recipe.quantize_weights(w_EOI)
        if self.tiling is None:
            wide = torch.promote_types(dtype, torch.float32)
            rows = x_NI if index_M is None else x_NI.take(index_M)
            return _grouped_mm_reference(rows.read(wide), w.read(wide).mT, self.offsets[1:]).to(dtype)
        from .gpu.fp8 import fp8_rows_times_weights

        return fp8_rows_times_weights(
            x_NI.stored, x_NI.scales, w.stored, w.scales, self.tiling, dtype, index_M, self.num_sms
        )  # fmt: skip


class _Fp8ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, weights_NK: Tensor | None, order: ExpertOrder,
        weight_inside: bool, options: GroupedGemmOptions, recipe: Fp8Recipe, triton: bool,
    ) -> Tensor:  # fmt: skip
        dtype, products = x_ND.dtype, _Products(order, recipe, options.num_sms, triton)
        x_ND8 = products.round_rows(x_ND)
        z_MG = products.multiply(x_ND8, gate_up_EGD, dtype, order.gather_idx_M)
        h_MF = _swiglu(z_MG)[0]
        if weight_inside and weights_NK is not None:
            h_MF = h_MF * weights_NK.flatten()[order.choice_idx_M, None]
        out_MD = products.multiply(products.round_rows(h_MF), down_EDF, dtype)
        ctx.save_for_backward(x_ND8.stored, x_ND8.scales, gate_up_EGD, down_EDF, weights_NK, z_MG)
        ctx.order, ctx.options, ctx.products, ctx.parameters = order, options, products, (gate_up_EGD, down_EDF)
        return gather_sum(out_MD, order.positions_NK, None if weight_inside else weights_NK, options.kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward("experts in FP8", "use fp8=None")
        stored, scales, gate_up_EGD, down_EDF, weights_NK, z_MG = ctx.saved_tensors
        dy_ND, order, options, products = grads[0].contiguous(), ctx.order, ctx.options, ctx.products
        index_M, offsets, dtype = order.gather_idx_M, order.expert_offsets, dy_ND.dtype
        h_MF, silu, up, slope = _swiglu(z_MG)
        dh_MF = products.multiply(products.round_rows(dy_ND), down_EDF.mT, h_MF.dtype, index_M)
        dx = d_gate_up = d_down = d_weights = None
        wants_x, wants_gate_up, wants_down, wants_weights = ctx.needs_input_grad[:4]
        if weights_NK is not None:
            weights_M1 = weights_NK.flatten()[order.choice_idx_M, None]
            if wants_weights:  # the gradient of an invalid choice comes from the 0 at the end, at its position of -1
                dots_M = torch.cat([(dh_MF * h_MF).sum(-1), dh_MF.new_zeros(1)])
                d_weights = dots_M[order.positions_NK].to(weights_NK.dtype)
            dh_MF, h_MF = weights_M1 * dh_MF, weights_M1 * h_MF
        dz_MG = torch.cat([dh_MF * up * slope, dh_MF * silu], -1).to(dtype)
        if wants_x:
            dx_MD = products.multiply(products.round_rows(dz_MG), gate_up_EGD.mT, dtype)
            dx = gather_sum(dx_MD, order.positions_NK, None, options.kernels)
        gate_up, down = ctx.parameters

        def weight_grad(parameter: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
            to = grad_dtype(parameter)
            compute = partial(_grouped_wgrad, dy, x, offsets, to, options.num_sms, options.kernels)
            return compute_or_defer(options.weight_grads, parameter, compute, compute, options.accumulate)

        if wants_down:
            d_down = weight_grad(down, dy_ND.index_select(0, index_M), h_MF.to(dtype))
        if wants_gate_up:
            x_MD = Fp8Matrix(stored, scales, 1, products.recipe.block).take(index_M).read(dtype)
            d_gate_up = weight_grad(gate_up, dz_MG, x_MD)
        return dx, d_gate_up, d_down, d_weights, None, None, None, None, None


def _swiglu(z_MG: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """silu(gate) * up, silu(gate), up and the derivative of silu at gate, [M, F] each, in fp32 or wider."""
    gate, up = z_MG.to(torch.promote_types(z_MG.dtype, torch.float32)).chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return silu * up, silu, up, sigmoid * (1 + gate * (1 - sigmoid))


def fp8_experts(
    x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, order: ExpertOrder, weights_NK: Tensor | None,
    weight_inside: bool, options: GroupedGemmOptions, recipe: Fp8Recipe, triton: bool,
) -> Tensor:  # fmt: skip
    """`experts` with `recipe`. triton: with the Triton kernels."""
    arguments = x_ND, gate_up_EGD, down_EDF, weights_NK, order, weight_inside, options, recipe, triton
    return _Fp8ExpertsFunction.apply(*arguments)  # type: ignore[return-value]
