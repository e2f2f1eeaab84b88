"""`permute` rows into expert-major order, and `unpermute` them back as weighted sums over each row's choices.

Without weights, each is the backward of the other. `ExpertOrder` (routing.py) has both the row of each position and
the positions of each row. So both directions are gathers, which need no atomics and have the same result in every run.

`gather` and `gather_sum` are the same operations without autograd. expert_parallel/ uses them to pack the rows for each
rank and to sum the rows that the ranks return. The Triton kernels are in gpu/permute.py.

N rows, D model dim, K choices per row, M positions.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backend import Kernels, aligned, check_contiguous_rows, forbid_double_backward, use_triton
from .fuse import opaque
from .order import ExpertOrder


def gather(x_ND: Tensor, index_M: Tensor, out_MD: Tensor | None = None, kernels: Kernels = "auto") -> Tensor:
    """Return x[index], [M, D], written to `out_MD` if given. x may have an integer dtype.

    Raises ValueError for an `out_MD` of another shape.
    """
    if out_MD is not None and out_MD.shape != (shape := (len(index_M), x_ND.shape[1])):
        raise ValueError(f"out must be {[*shape]}: got {[*out_MD.shape]}")
    if use_triton(kernels, x_ND, index_M, out_MD):
        from .gpu.permute import gather_rows

        x_ND, index_M = check_contiguous_rows("rows", x_ND), aligned("index", index_M.contiguous())
        in_place = out_MD is not None and check_contiguous_rows("out", out_MD) is out_MD
        rows_MD = gather_rows(x_ND, index_M, out_MD if in_place else None)
        return rows_MD if in_place or out_MD is None else out_MD.copy_(rows_MD)
    # index_select is three times as fast on a CPU as x_ND[index_M], but not if it writes to rows with gaps.
    if out_MD is None or out_MD.is_contiguous():
        return torch.index_select(x_ND, 0, index_M, out=out_MD)
    return out_MD.copy_(x_ND.index_select(0, index_M))


def gather_sum(
    rows_MD: Tensor, positions_NK: Tensor, weights_NK: Tensor | None = None, kernels: Kernels = "auto"
) -> Tensor:
    """Return y [N, D], with y[n] = the sum over k of weights[n, k] rows[positions[n, k]]. Positions of -1 are skipped.

    The weights of skipped positions are not used: they may be NaN. Sums are taken in the order of k, in fp32 or wider,
    and rounded once.
    """
    if use_triton(kernels, rows_MD, positions_NK, weights_NK):
        from .gpu.permute import sum_rows

        weights_NK = None if weights_NK is None else aligned("weights", weights_NK.contiguous())
        positions_NK = aligned("positions", positions_NK.contiguous())
        return sum_rows(check_contiguous_rows("rows", rows_MD), positions_NK, weights_NK)
    return _gather_sum(rows_MD, positions_NK, weights_NK)


@opaque(lambda rows_MD, positions_NK, _: rows_MD.new_empty(len(positions_NK), rows_MD.shape[1]))
def _gather_sum(rows_MD: Tensor, positions_NK: Tensor, weights_NK: Tensor | None) -> Tensor:
    dtype = rows_MD.dtype
    rows_MD = rows_MD.to(torch.promote_types(rows_MD.dtype, torch.float32))
    weights_NK = None if weights_NK is None else weights_NK.to(rows_MD.dtype)
    valid_NK, offsets_N = positions_NK >= 0, None
    if positions_NK.is_cuda:  # counting the valid positions would be a host sync
        weights_NK = None if weights_NK is None else torch.where(valid_NK, weights_NK, 0)
        positions_NK = torch.where(valid_NK, positions_NK, len(rows_MD))
        rows_MD = torch.cat([rows_MD, rows_MD.new_zeros(1, rows_MD.shape[1])])
    elif not valid_NK.all():
        counts_N = valid_NK.sum(1, dtype=torch.int32)
        offsets_N = counts_N.cumsum(0, dtype=torch.int32) - counts_N
        positions_NK = positions_NK.masked_select(valid_NK)
        weights_NK = None if weights_NK is None else weights_NK.masked_select(valid_NK)
    return F.embedding_bag(positions_NK, rows_MD, offsets_N, mode="sum", per_sample_weights=weights_NK).to(dtype)


def _gradients(
    dy_ND: Tensor, rows_MD: Tensor, order: ExpertOrder, weights_NK: Tensor, wants_rows: bool, wants_weights: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of `gather_sum` with respect to rows, [M, D], and weights, [N, K], in plain torch.

    They are dy[gather_idx] times the weight of each choice, and <dy[n], rows[positions[n, k]]>.
    """
    d_rows = d_weights = None
    dy_MD = dy_ND.index_select(0, order.gather_idx_M)
    if wants_weights:
        wide = torch.promote_types(rows_MD.dtype, torch.float32)
        # The gradient of an invalid choice comes from the 0 at the end, at its position of -1.
        dots_M = torch.cat([(dy_MD.to(wide) * rows_MD).sum(-1), dy_MD.new_zeros(1, dtype=wide)])
        d_weights = dots_M[order.positions_NK].to(weights_NK.dtype)
    if wants_rows:
        weights_M = weights_NK.flatten()[order.choice_idx_M]
        d_rows = (dy_MD * weights_M[:, None]).to(dy_ND.dtype)
    return d_rows, d_weights


def _gradients_triton(
    dy_ND: Tensor, rows_MD: Tensor, order: ExpertOrder, weights_NK: Tensor, wants_rows: bool, wants_weights: bool
) -> tuple[Tensor | None, Tensor | None]:
    """`_gradients` in Triton."""
    from .gpu.permute import dot_rows, gather_rows

    dy_ND, rows_MD = aligned("dy", dy_ND), check_contiguous_rows("rows", rows_MD)
    d_rows = d_weights = None
    if wants_rows:
        weights_NK = aligned("weights", weights_NK.contiguous())
        d_rows = gather_rows(dy_ND, order.gather_idx_M, None, weights_NK, order.choice_idx_M)
    if wants_weights:
        d_weights = dot_rows(dy_ND, rows_MD, order.positions_NK).to(weights_NK.dtype)
    return d_rows, d_weights


class _PermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order: ExpertOrder, kernels: Kernels) -> Tensor:
        ctx.order, ctx.kernels = order, kernels
        return gather(x_ND, order.gather_idx_M, kernels=kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if use_triton(ctx.kernels, grads[0]):
            forbid_double_backward()
        return gather_sum(grads[0].contiguous(), ctx.order.positions_NK, kernels=ctx.kernels), None, None


class _UnpermuteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, weights_NK: Tensor | None, order: ExpertOrder, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(*((rows_MD, weights_NK) if weights_NK is not None else ()))
        ctx.order, ctx.kernels = order, kernels
        return gather_sum(rows_MD, order.positions_NK, weights_NK, kernels)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dy_ND, order, saved = grads[0].contiguous(), ctx.order, ctx.saved_tensors
        if triton := use_triton(ctx.kernels, dy_ND):
            forbid_double_backward()
        if not saved:
            return gather(dy_ND, order.gather_idx_M, kernels=ctx.kernels), None, None, None
        rows_MD, weights_NK = saved
        gradients = _gradients_triton if triton else _gradients
        return *gradients(dy_ND, rows_MD, order, weights_NK, *ctx.needs_input_grad[:2]), None, None


def permute(x_ND: Tensor, order: ExpertOrder, kernels: Kernels = "auto") -> Tensor:
    """Return one row per choice in expert-major order, [M, D] from [N, D]. Raises ValueError unless x has N rows.

    Example: order.gather_idx_M = [0, 0, 1] gives rows x[0], x[0], x[1].
    """
    check_rows("x", x_ND, len(order.positions_NK))
    return _PermuteFunction.apply(x_ND, order, kernels)  # type: ignore[return-value]


def unpermute(
    rows_MD: Tensor, order: ExpertOrder, weights_NK: Tensor | None = None, kernels: Kernels = "auto"
) -> Tensor:
    """Return the weighted sum of each row's choices, [N, D] from [M, D].

    weights_NK: [N, K] in fp32; None: all 1. Sums are taken in the order of k, in fp32 or wider. Raises ValueError if
    shapes do not match `order`.

    Example: order.positions_NK = [[1, 0], [2, -1]] gives w[0, 0] rows[1] + w[0, 1] rows[0] and w[1, 0] rows[2].
    """
    check_rows("rows", rows_MD, len(order.gather_idx_M))
    check_routing_weights(weights_NK, order)
    return _UnpermuteFunction.apply(rows_MD, weights_NK, order, kernels)  # type: ignore[return-value]


def check_rows(name: str, x: Tensor, num_rows: int) -> None:
    """Raise ValueError unless `x` is [num_rows, D]."""
    if x.ndim != 2 or len(x) != num_rows:
        raise ValueError(f"this order needs {name} [{num_rows}, D]: got {[*x.shape]}")


def check_routing_weights(weights_NK: Tensor | None, order: ExpertOrder) -> None:
    """Raise ValueError unless the routing weights have the shape of the choices."""
    if weights_NK is not None and weights_NK.shape != order.positions_NK.shape:
        raise ValueError(f"weights must be [N, K] = {[*order.positions_NK.shape]}: got {[*weights_NK.shape]}")
