"""`experts` in FP8: forward and input gradients multiply 8-bit numbers, weight gradients those in the model's dtype.

    forward   z = up(x8[gather_idx]);   h = swiglu(z);   y = sum over k of w down(h8)[positions]
    backward  dh = down^T(dy8[gather_idx]);   dz, dw = backward of SwiGLU;   dx = sum over k of up^T(dz8)[positions]
              d down = dy[gather_idx]^T (w h);   d up = dz^T x8[gather_idx]       (can be deferred)

An 8 marks what is rounded to 8 bits (fp8.py), and w are the routing weights. Expert weights are rounded, too; z, dz and
the results are in the model's dtype.
Backward needs x in 8 bits with its scales, and z. A weight gradient sums over rows, so 8-bit operands would need blocks
along another dimension, and its errors would add up in the weights, step after step: it multiplies numbers in the
model's dtype.

In plain torch, a product reads the 8-bit numbers, multiplies in fp32, and rounds once.

N rows, K choices per row, M choices in expert-major order, E experts, D model dim, F inner width, G = 2F.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .backend import check_contiguous_rows, forbid_double_backward, use_triton
from .fp8 import Fp8Matrix, Fp8Recipe
from .grouped_gemm import GroupedGemmOptions, _grouped_mm_reference, _grouped_wgrad
from .linear import at_least_fp32, compute_or_defer, grad_dtype
from .order import ExpertOrder
from .permute import gather_sum


class PlainTorch:
    """What the experts compute in FP8, as plain operators. `TritonKernels` has the same methods."""

    def __init__(self, order: ExpertOrder, recipe: Fp8Recipe, num_sms: int | None = None):
        self.order, self.recipe, self.num_sms = order, recipe, num_sms

    def round_rows(self, x_RC: Tensor) -> Fp8Matrix:
        return self.recipe.quantize_rows(x_RC)

    def multiply(self, x_NI: Fp8Matrix, w_EOI: Tensor, dtype: torch.dtype, index_M: Tensor | None = None) -> Tensor:
        """y[m] = W[e] x[m] for the rows m of each expert e: [M, O]. index_M: the row of x for each m."""
        wide = torch.promote_types(dtype, torch.float32)
        rows_MI = (x_NI if index_M is None else x_NI.take(index_M)).read(wide)
        w_EIO = self.recipe.quantize_weights(w_EOI).read(wide).mT
        return _grouped_mm_reference(rows_MI, w_EIO, self.order.expert_offsets[1:]).to(dtype)

    def swiglu(self, z_MG: Tensor, weights_NK: Tensor | None) -> Fp8Matrix:
        """silu(gate) * up, rounded; times the routing weight of each row, if given."""
        gate, up = at_least_fp32(z_MG).chunk(2, -1)
        h_MF = functional.silu(gate) * up
        return self.recipe.quantize_rows(h_MF if weights_NK is None else h_MF * self._of_rows(weights_NK))

    def swiglu_backward(
        self, dh_MF: Tensor, z_MG: Tensor, weights_NK: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The gradient of z, the weighted h, and the gradient of the routing weights [N, K], from that of h."""
        gate, up = at_least_fp32(z_MG).chunk(2, -1)
        sigmoid = gate.sigmoid()
        silu, dtype = gate * sigmoid, z_MG.dtype
        h_MF, slope, d_weights = silu * up, sigmoid + silu * (1 - sigmoid), None
        if weights_NK is not None:
            # The gradient of an invalid choice comes from the 0 at the end, at its position of -1.
            dots_M = torch.cat([(dh_MF * h_MF).sum(-1), dh_MF.new_zeros(1)])
            d_weights = dots_M[self.order.positions_NK]
            dh_MF, h_MF = self._of_rows(weights_NK) * dh_MF, self._of_rows(weights_NK) * h_MF
        return torch.cat([dh_MF * up * slope, dh_MF * silu], -1).to(dtype), h_MF.to(dtype), d_weights

    def _of_rows(self, weights_NK: Tensor) -> Tensor:
        return weights_NK.flatten()[self.order.choice_idx_M, None]


class TritonKernels(PlainTorch):
    """The same with the kernels of gpu/fp8.py."""

    def __init__(self, order: ExpertOrder, recipe: Fp8Recipe, num_sms: int | None = None):
        from .gpu import fp8
        from .gpu.tiles import Tiling

        super().__init__(order, recipe, num_sms)
        self.kernels = fp8
        self.tiling = Tiling(order.expert_offsets, len(order.gather_idx_M), dict(order.tile_tables))

    def round_rows(self, x_RC: Tensor) -> Fp8Matrix:
        rows = check_contiguous_rows("rows", x_RC)
        return self.kernels.quantize_rows(rows, self.recipe.block, self.recipe.power_of_two)

    def multiply(self, x_NI: Fp8Matrix, w_EOI: Tensor, dtype: torch.dtype, index_M: Tensor | None = None) -> Tensor:
        w = self.recipe.quantize_weights(w_EOI)
        return self.kernels.fp8_rows_times_weights(x_NI, w, self.tiling, dtype, index_M, self.num_sms)

    def swiglu(self, z_MG: Tensor, weights_NK: Tensor | None) -> Fp8Matrix:
        choice_M, recipe = self.order.choice_idx_M, self.recipe
        return self.kernels.swiglu_round(z_MG, weights_NK, choice_M, recipe.block, recipe.power_of_two)

    def swiglu_backward(
        self, dh_MF: Tensor, z_MG: Tensor, weights_NK: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        from .gpu.permute import sum_partials

        dz_MG, h_MF, sums = self.kernels.swiglu_backward(dh_MF, z_MG, weights_NK, self.order.choice_idx_M)
        return dz_MG, h_MF, None if sums is None else sum_partials(sums, self.order.positions_NK)


class _Fp8ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, weights_NK: Tensor | None, weight_inside: bool,
        options: GroupedGemmOptions, run: PlainTorch,
    ) -> Tensor:  # fmt: skip
        order = run.order
        inside, outside = (weights_NK, None) if weight_inside else (None, weights_NK)
        x_ND8 = run.round_rows(x_ND)
        z_MG = run.multiply(x_ND8, gate_up_EGD, x_ND.dtype, order.gather_idx_M)
        out_MD = run.multiply(run.swiglu(z_MG, inside), down_EDF, x_ND.dtype)
        ctx.save_for_backward(x_ND8.stored, x_ND8.scales, gate_up_EGD, down_EDF, weights_NK, z_MG)
        ctx.run, ctx.options, ctx.parameters = run, options, (gate_up_EGD, down_EDF)
        return gather_sum(out_MD, order.positions_NK, outside, options.kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        forbid_double_backward("experts in FP8", "use fp8=None")
        stored, scales, gate_up_EGD, down_EDF, weights_NK, z_MG = ctx.saved_tensors
        run, options, dy_ND = ctx.run, ctx.options, grads[0].contiguous()
        index_M, offsets, dtype = run.order.gather_idx_M, run.order.expert_offsets, dy_ND.dtype
        wide = torch.promote_types(dtype, torch.float32)
        dh_MF = run.multiply(run.round_rows(dy_ND), down_EDF.mT, wide, index_M)
        dz_MG, h_MF, d_weights = run.swiglu_backward(dh_MF, z_MG, weights_NK)
        dx = d_gate_up = d_down = None
        wants_x, wants_gate_up, wants_down, wants_weights = ctx.needs_input_grad[:4]
        d_weights = d_weights.to(weights_NK.dtype) if wants_weights and d_weights is not None else None
        if wants_x:
            dx_MD = run.multiply(run.round_rows(dz_MG), gate_up_EGD.mT, dtype)
            dx = gather_sum(dx_MD, run.order.positions_NK, None, options.kernels)
        gate_up, down = ctx.parameters

        def weight_grad(parameter: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
            to = grad_dtype(parameter)
            compute = partial(_grouped_wgrad, dy, x, offsets, to, options.num_sms, options.kernels)
            return compute_or_defer(options.weight_grads, parameter, compute, compute, options.accumulate)

        if wants_down:
            d_down = weight_grad(down, dy_ND.index_select(0, index_M), h_MF)
        if wants_gate_up:
            x_MD = Fp8Matrix(stored, scales, 1, run.recipe.block).take(index_M).read(dtype)
            d_gate_up = weight_grad(gate_up, dz_MG, x_MD)
        return dx, d_gate_up, d_down, d_weights, None, None, None


def fp8_products(
    order: ExpertOrder, recipe: Fp8Recipe, options: GroupedGemmOptions, *tensors: Tensor | None
) -> PlainTorch:
    """What multiplies `tensors` in FP8. Raises ValueError if kernels="triton" does not have the recipe."""
    device = order.gather_idx_M.device
    fault = recipe.kernels_fault(device)
    if fault and options.kernels == "triton":
        raise ValueError(f'FP8 {fault}, or kernels="reference"')
    triton = not fault and use_triton(options.kernels, *tensors, order.gather_idx_M)
    return (TritonKernels if triton else PlainTorch)(order, recipe, options.num_sms)


def fp8_experts(
    x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, weights_NK: Tensor | None, weight_inside: bool,
    options: GroupedGemmOptions, run: PlainTorch,
) -> Tensor:  # fmt: skip
    """`experts` with the products of `fp8_products`."""
    arguments = x_ND, gate_up_EGD, down_EDF, weights_NK, weight_inside, options, run
    return _Fp8ExpertsFunction.apply(*arguments)  # type: ignore[return-value]


class _Fp8FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, w_EOI: Tensor, dtype: torch.dtype, run: PlainTorch) -> Tensor:
        ctx.save_for_backward(w_EOI)
        ctx.run, ctx.x_dtype = run, x_MI.dtype
        return run.multiply(run.round_rows(x_MI), w_EOI, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        forbid_double_backward("experts in FP8", "use fp8=None")
        (w_EOI,) = ctx.saved_tensors
        return ctx.run.multiply(ctx.run.round_rows(grads[0].contiguous()), w_EOI.mT, ctx.x_dtype), None, None, None


def fp8_frozen_linear(x_MI: Tensor, w_EOI: Tensor, dtype: torch.dtype, run: PlainTorch) -> Tensor:
    """y[m] = W[e] x[m] in `dtype`, for the rows m of each expert e, with weights that are not trained: [M, O]."""
    return _Fp8FrozenLinear.apply(x_MI, w_EOI, dtype, run)  # type: ignore[return-value]
