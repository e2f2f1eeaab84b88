"""`experts` in FP8: forward and input gradients multiply 8-bit numbers, weight gradients those in the model's dtype.

    forward   z = up(x8[gather_idx]);   h = swiglu(z);   y = sum over k of w down(h8)[positions]
    backward  dh = down^T(dy8[gather_idx]);   dz, dw = backward of SwiGLU;   dx = sum over k of up^T(dz8)[positions]
              d down = dy[gather_idx]^T (w h);   d up = dz^T x8[gather_idx]       (can be deferred)

An 8 marks what is rounded to 8 bits (fp8.py). Weights are rounded, too; z, dz and the results are in the model's dtype.
Backward needs x in 8 bits with its scales, and z. A weight gradient sums over rows, so 8-bit operands would need blocks
along another dimension, and its errors would add up in the weights, step after step: it multiplies numbers in the
model's dtype.

The products are in plain torch: they read the 8-bit numbers, multiply in fp32, and round once.

N rows, K choices per row, M choices in expert-major order, E experts, D model dim, F inner width, G = 2F.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .backend import forbid_double_backward
from .fp8 import Fp8Matrix, Fp8Recipe
from .grouped_gemm import GroupedGemmOptions, _grouped_mm_reference, _grouped_wgrad
from .linear import compute_or_defer, grad_dtype
from .order import ExpertOrder
from .permute import gather_sum


def fp8_product(x_MI: Fp8Matrix, w_EOI: Fp8Matrix, expert_offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """y[m] = W[e] x[m] for the rows m of each expert e: [M, O]. Sums are taken in fp32 or wider, and rounded once."""
    wide = torch.promote_types(dtype, torch.float32)
    return _grouped_mm_reference(x_MI.read(wide), w_EOI.read(wide).mT, expert_offsets[1:]).to(dtype)


class _Fp8ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, weights_NK: Tensor | None, order: ExpertOrder,
        weight_inside: bool, options: GroupedGemmOptions, recipe: Fp8Recipe,
    ) -> Tensor:  # fmt: skip
        dtype, offsets = x_ND.dtype, order.expert_offsets
        x_ND8 = recipe.quantize_rows(x_ND)
        rows_MD8 = x_ND8.take(order.gather_idx_M)
        z_MG = fp8_product(rows_MD8, recipe.quantize_weights(gate_up_EGD), offsets, dtype)
        h_MF = _swiglu(z_MG)[0]
        if weight_inside and weights_NK is not None:
            h_MF = h_MF * weights_NK.flatten()[order.choice_idx_M, None]
        out_MD = fp8_product(recipe.quantize_rows(h_MF), recipe.quantize_weights(down_EDF), offsets, dtype)
        ctx.save_for_backward(x_ND8.stored, x_ND8.scales, gate_up_EGD, down_EDF, weights_NK, z_MG)
        ctx.order, ctx.options, ctx.recipe, ctx.parameters = order, options, recipe, (gate_up_EGD, down_EDF)
        return gather_sum(out_MD, order.positions_NK, None if weight_inside else weights_NK, options.kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward("experts in FP8", "use fp8=None")
        stored, scales, gate_up_EGD, down_EDF, weights_NK, z_MG = ctx.saved_tensors
        dy_ND, order, options, recipe = grads[0], ctx.order, ctx.options, ctx.recipe
        index_M, offsets, dtype = order.gather_idx_M, order.expert_offsets, dy_ND.dtype
        h_MF, silu, up, slope = _swiglu(z_MG)
        dy_MD8 = recipe.quantize_rows(dy_ND).take(index_M)
        dh_MF = fp8_product(dy_MD8, recipe.quantize_weights(down_EDF.mT), offsets, h_MF.dtype)
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
            dx_MD = fp8_product(
                recipe.quantize_rows(dz_MG), recipe.quantize_weights(gate_up_EGD.mT), offsets, dtype
            )  # fmt: skip
            dx = gather_sum(dx_MD, order.positions_NK, None, options.kernels)
        gate_up, down = ctx.parameters

        def weight_grad(parameter: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
            to = grad_dtype(parameter)
            compute = partial(_grouped_wgrad, dy, x, offsets, to, options.num_sms, options.kernels)
            return compute_or_defer(options.weight_grads, parameter, compute, compute, options.accumulate)

        if wants_down:
            d_down = weight_grad(down, dy_ND.index_select(0, index_M), h_MF.to(dtype))
        if wants_gate_up:
            x_MD = Fp8Matrix(stored, scales, 1, recipe.block).take(index_M).read(dtype)
            d_gate_up = weight_grad(gate_up, dz_MG, x_MD)
        return dx, d_gate_up, d_down, d_weights, None, None, None, None


def _swiglu(z_MG: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """silu(gate) * up, silu(gate), up and the derivative of silu at gate, [M, F] each, in fp32 or wider."""
    gate, up = z_MG.to(torch.promote_types(z_MG.dtype, torch.float32)).chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return silu * up, silu, up, sigmoid * (1 + gate * (1 - sigmoid))


def fp8_experts(
    x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, order: ExpertOrder, weights_NK: Tensor | None,
    weight_inside: bool, options: GroupedGemmOptions, recipe: Fp8Recipe,
) -> Tensor:  # fmt: skip
    """`experts` with `recipe`."""
    tensors = x_ND, gate_up_EGD, down_EDF, weights_NK
    return _Fp8ExpertsFunction.apply(*tensors, order, weight_inside, options, recipe)  # type: ignore[return-value]
