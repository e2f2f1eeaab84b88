"""`experts`: the SwiGLU MLP of a Mixture-of-Experts layer, from tokens to the weighted sum over their experts.

    y[n] = sum over the choices k of row n:  w[n, k] * down_e( silu(gate_e x[n]) * up_e x[n] )

The plain-torch version (`experts_reference`) is a chain of operators. It allocates a sorted copy of the tokens, a
pre-activation, an activation and an output for each choice, and saves most of them for backward.

The Triton version reads tokens through an index, applies SwiGLU to a tile in registers, and saves only x and the
pre-activation z: 2 D + 4 K F bytes per token in 16-bit dtypes, plus indices. Backward recomputes the activation from z,
and computes the gradient of the routing weights without the experts' outputs: <dy, down h> = <down^T dy, h>. The
products are those of SonicMoE (arXiv 2512.14080), but without atomics, so every run has bit-identical results.

    forward   z, h = up(x[gather_idx]);   o = down(h);   y = sum over k of w o[positions]
    backward  dz, wh, dw = backward of SwiGLU, from down^T(dy[gather_idx]) and z;   wh = w h
              dx = sum over k of (up^T dz)[positions]
              d down = dy[gather_idx]^T wh;   d up = dz^T x[gather_idx]            (can be deferred)

N rows, K choices per row, M choices in expert-major order, E experts, D model dim, F inner width, G = 2F.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .backend import Kernels, aligned, check_contiguous, check_contiguous_rows, forbid_double_backward, use_triton
from .fp8 import Fp8Recipe
from .fp8_experts import fp8_experts, fp8_frozen_linear, fp8_products
from .fuse import fuse
from .grouped_gemm import GroupedGemmOptions, GroupedLinearFunction, check_offsets, grouped_linear
from .linear import apply_autocast, at_least_fp32, compute_or_defer, grad_dtype
from .order import ExpertOrder
from .permute import check_routing_weights, check_rows, permute, unpermute
from .weight_grads import WeightGrads


def swiglu(gate_up: Tensor) -> Tensor:
    """Return silu of the first half times the second half, [..., F] from [..., 2F] (arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def experts_reference(
    x_ND: Tensor, order: ExpertOrder, weights_NK: Tensor | None, product: Callable[[str, Tensor], Tensor],
    kernels: Kernels, compiled: bool, weight_inside: bool = False, wide: bool = False,
) -> Tensor:  # fmt: skip
    """`experts` as a chain of plain operators.

    product(name, rows): rows times the weights "gate_up" or "down". wide: SwiGLU in fp32.
    """
    z_MG = product("gate_up", permute(x_ND, order, kernels))
    z_MG = at_least_fp32(z_MG) if wide else z_MG
    h_MF = fuse(swiglu, compiled and len(z_MG) > 1, rows_vary=True)(z_MG)  # 0 or 1 rows would be another graph
    if weight_inside and weights_NK is not None:
        h_MF = (h_MF * weights_NK.flatten()[order.choice_idx_M, None]).to(h_MF.dtype)
        weights_NK = None
    return unpermute(product("down", h_MF), order, weights_NK, kernels)


class _ExpertsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, weights_NK: Tensor | None, order: ExpertOrder,
        weight_inside: bool, options: GroupedGemmOptions, store_z: bool,
    ) -> Tensor:  # fmt: skip
        from .gpu.gemm import rows_times_weights
        from .gpu.permute import sum_rows
        from .gpu.swiglu import swiglu_up
        from .gpu.tiles import Tiling

        tiling = Tiling(order.expert_offsets, len(order.gather_idx_M), dict(order.tile_tables))
        inside, outside = (weights_NK, None) if weight_inside else (None, weights_NK)
        index_M, choice_M = order.gather_idx_M, order.choice_idx_M
        ctx.gate_up, ctx.down = gate_up_EGD, down_EDF
        gate_up_EGD, down_EDF = aligned("gate_up", gate_up_EGD), aligned("down", down_EDF)
        z_MG, h_MF = swiglu_up(x_ND, index_M, gate_up_EGD, tiling, inside, choice_M, store_z, options.num_sms)
        out_MD = rows_times_weights("down", h_MF, down_EDF, tiling, num_sms=options.num_sms)
        ctx.save_for_backward(x_ND, gate_up_EGD, down_EDF, weights_NK, z_MG)
        ctx.order, ctx.tiling, ctx.options = order, tiling, options
        return sum_rows(out_MD, order.positions_NK, outside)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from .gpu.gemm import rows_times_weights
        from .gpu.permute import sum_partials, sum_rows
        from .gpu.swiglu import swiglu_down_backward
        from .gpu.wgrad import weight_gradients

        forbid_double_backward()
        dy_ND = aligned("dy", grads[0].contiguous())
        order, options, num_sms = ctx.order, ctx.options, ctx.options.num_sms
        x_ND, gate_up_EGD, down_EDF, weights_NK, z_MG = ctx.saved_tensors
        index_M, offsets = order.gather_idx_M, order.expert_offsets
        dz_MG, h_MF, sums = swiglu_down_backward(
            dy_ND, index_M, down_EDF, z_MG, ctx.tiling, weights_NK, order.choice_idx_M, num_sms
        )
        dx = d_gate_up = d_down = d_weights = None
        wants_x, wants_gate_up, wants_down, wants_weights = ctx.needs_input_grad[:4]
        if wants_x:
            dx_MD = rows_times_weights("up_backward", dz_MG, gate_up_EGD, ctx.tiling, True, num_sms=num_sms)
            dx = sum_rows(dx_MD, order.positions_NK)
        if wants_weights and sums is not None:
            d_weights = sum_partials(sums, order.positions_NK).to(weights_NK.dtype)
        if wants_down:
            dtype = grad_dtype(ctx.down)
            d_weight = partial(weight_gradients, dy_ND, h_MF, offsets, dtype, index_M, None, num_sms=num_sms)
            d_down = compute_or_defer(options.weight_grads, ctx.down, d_weight, d_weight, options.accumulate)
        if wants_gate_up:
            dtype = grad_dtype(ctx.gate_up)
            d_weight = partial(weight_gradients, dz_MG, x_ND, offsets, dtype, None, index_M, num_sms=num_sms)
            d_gate_up = compute_or_defer(options.weight_grads, ctx.gate_up, d_weight, d_weight, options.accumulate)
        return dx, d_gate_up, d_down, d_weights, None, None, None, None


def experts(
    x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, order: ExpertOrder, weights_NK: Tensor | None = None, *,
    weight_inside: bool = False, accumulate: bool = False, num_sms: int | None = None,
    weight_grads: WeightGrads | None = None, kernels: Kernels = "auto", compiled: bool = False,
    fp8: Fp8Recipe | None = None,
) -> Tensor:  # fmt: skip
    """Apply each row's experts, a SwiGLU MLP each, and return the weighted sum of their outputs: [N, D].

    x_ND: [N, D]. gate_up_EGD: [E, 2F, D], the rows of gate before the rows of up. down_EDF: [E, D, F].
    order: the result of `expert_order` for N rows and E experts.
    weights_NK: routing weights, [N, K] in fp32; None: all 1.
    weight_inside: apply the routing weight before the down projection, not after it. Results differ only by rounding.
    accumulate, num_sms, weight_grads, kernels: as in `grouped_linear`, for the weights gate_up and down. Triton also
    needs contiguous rows of x. compiled: fuse the activation with torch.compile (fuse.py), where Triton is not used.
    fp8: how to round the operands of products to 8 bits (fp8_experts.py); None: not at all.
    Raises ValueError if shapes, dtypes or devices do not match, and for a recipe that kernels="triton" does not have.

    Example: one expert with gate = up = down = [[1]] and x = [[2]], weight 0.5: y = 0.5 * silu(2) * 2 = 1.7616.
    """
    options = GroupedGemmOptions(weight_grads, accumulate, num_sms, kernels)
    (x_ND, gate_up_EGD), (_, down_EDF) = apply_autocast(x_ND, gate_up_EGD), apply_autocast(x_ND, down_EDF)
    _check(x_ND, gate_up_EGD, down_EDF, order)
    check_routing_weights(weights_NK, order)
    options.check(gate_up=gate_up_EGD, down=down_EDF)
    if fp8 is not None:
        run = fp8_products(order, fp8, options, x_ND, gate_up_EGD, down_EDF, weights_NK)
        weights_NK = None if weights_NK is None else aligned("weights", weights_NK.contiguous())
        return fp8_experts(x_ND, gate_up_EGD, down_EDF, weights_NK, weight_inside, options, run)
    if not use_triton(kernels, x_ND, gate_up_EGD, down_EDF, order.gather_idx_M, weights_NK):
        check_offsets(order.expert_offsets, len(down_EDF), len(order.gather_idx_M))
        weights = {"gate_up": gate_up_EGD, "down": down_EDF}

        def product(name: str, rows: Tensor) -> Any:
            return GroupedLinearFunction.apply(rows, weights[name], order.expert_offsets, options)

        return experts_reference(x_ND, order, weights_NK, product, kernels, compiled, weight_inside)
    x_ND = check_contiguous_rows("x", x_ND)
    gate_up_EGD, down_EDF = check_contiguous("gate_up", gate_up_EGD), check_contiguous("down", down_EDF)
    weights_NK = None if weights_NK is None else aligned("weights", weights_NK.contiguous())
    tensors = x_ND, gate_up_EGD, down_EDF, weights_NK
    # ctx.needs_input_grad is also true under no_grad, where z need not be stored.
    store_z = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return _ExpertsFunction.apply(*tensors, order, weight_inside, options, store_z)  # type: ignore[return-value]


def adapted_experts(
    x_ND: Tensor, gate_up_EGD: Tensor, down_EDF: Tensor, order: ExpertOrder, weights_NK: Tensor,
    low_rank: Callable[..., Tensor], *, num_sms: int | None = None, weight_grads: WeightGrads | None = None,
    kernels: Kernels = "auto", compiled: bool = False, fp8: Fp8Recipe | None = None,
) -> Tensor:  # fmt: skip
    """`experts` with frozen weights, and `low_rank(name, rows, offsets, **options)` added to the outputs of a product.

    name: "gate_up" or "down". Other arguments are those of `experts`. As a chain of operators on any device, because
    what is added changes the pre-activation, which the fused kernels keep in registers.
    """
    _check(x_ND, gate_up_EGD, down_EDF, order)
    options: dict[str, Any] = {"weight_grads": weight_grads, "num_sms": num_sms, "kernels": kernels}
    weights, dtype, run = {"gate_up": gate_up_EGD, "down": down_EDF}, x_ND.dtype, None
    if fp8 is not None:
        run = fp8_products(order, fp8, GroupedGemmOptions(**options), x_ND, gate_up_EGD, down_EDF, weights_NK)

    def product(name: str, rows: Tensor) -> Tensor:
        narrow = rows.to(dtype)
        if run is None:
            y = grouped_linear(narrow, weights[name], order.expert_offsets, **options)
        else:
            y = fp8_frozen_linear(rows, weights[name], dtype, run)
        return y + low_rank(name, narrow, order.expert_offsets, **options)

    return experts_reference(x_ND, order, weights_NK, product, kernels, compiled, wide=run is not None)


def _check(x: Tensor, gate_up: Tensor, down: Tensor, order: ExpertOrder) -> None:
    check_rows("x", x, len(order.positions_NK))
    if gate_up.ndim != 3 or down.ndim != 3 or gate_up.shape != (down.shape[0], 2 * down.shape[2], down.shape[1]):
        got = f"{[*gate_up.shape]} and {[*down.shape]}"
        raise ValueError(f"experts need gate_up [E, 2F, D] and down [E, D, F]: got {got}")
    num_experts = len(order.expert_offsets) - 1
    if len(down) != num_experts or down.shape[1] != x.shape[1]:
        given = f"x [N, {x.shape[1]}] and an order of {num_experts} experts"
        raise ValueError(f"{given} do not match down [E, D, F] = {[*down.shape]}")
    if not x.dtype == gate_up.dtype == down.dtype or not x.is_floating_point():
        got = f"{x.dtype}, {gate_up.dtype} and {down.dtype}"
        raise ValueError(f"x, gate_up and down must have one floating-point dtype: got {got}")
