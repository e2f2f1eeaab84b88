"""Copy rows into expert-major order, and sum them back. Each is the other's backward, and neither needs atomics.

`gather_rows` makes one row per (row, expert) choice; `sum_rows` adds a row's choices up again. Because every choice
knows its position and every position its row (kernels/routing.py), both directions are gathers: deterministic on every
device.

The plain-torch operators. N rows, D model, K choices a row, M positions.
"""

from typing import Any

import torch
from torch import Tensor


def sum_rows_reference(rows_MD: Tensor, positions_NK: Tensor) -> Tensor:
    """y[n] = sum over k of rows[positions[n, k]], skipping -1, in the order of k; summed in fp32 at least."""
    shape = positions_NK.shape[0], rows_MD.shape[1]
    y_ND = rows_MD.new_zeros(shape, dtype=torch.promote_types(rows_MD.dtype, torch.float32))
    for positions_N in positions_NK.unbind(1) if len(rows_MD) else ():
        y_ND = y_ND + torch.where(positions_N[:, None] >= 0, rows_MD[positions_N.clamp(min=0)], 0)
    return y_ND.to(rows_MD.dtype)


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, gather_idx_M: Tensor, positions_NK: Tensor) -> Tensor:
        ctx.save_for_backward(positions_NK)
        return x_ND[gather_idx_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (positions_NK,) = ctx.saved_tensors
        return sum_rows_reference(grads[0], positions_NK), None, None


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_MD: Tensor, gather_idx_M: Tensor, positions_NK: Tensor) -> Tensor:
        ctx.save_for_backward(gather_idx_M)
        return sum_rows_reference(rows_MD, positions_NK)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gather_idx_M,) = ctx.saved_tensors
        return grads[0][gather_idx_M], None, None


class _GatherChoices(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_NK: Tensor, choice_idx_M: Tensor) -> Tensor:
        ctx.save_for_backward(choice_idx_M)
        ctx.shape = values_NK.shape
        return values_NK.flatten()[choice_idx_M]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (choice_idx_M,) = ctx.saved_tensors
        values_NK = grads[0].new_zeros(ctx.shape)
        values_NK.view(-1)[choice_idx_M] = grads[0]
        return values_NK, None


def gather_choices(values_NK: Tensor, choice_idx_M: Tensor) -> Tensor:
    """One value per choice, [N, K], in expert-major order: [M]. Backward is zero for the choices that are not there."""
    return _GatherChoices.apply(values_NK, choice_idx_M)  # type: ignore[return-value]


def gather_rows(x_ND: Tensor, gather_idx_M: Tensor, positions_NK: Tensor) -> Tensor:
    """rows[m] = x[gather_idx[m]]: [M, D] from [N, D]. `positions_NK` is the inverse, for the backward."""
    return _GatherRows.apply(x_ND, gather_idx_M, positions_NK)  # type: ignore[return-value]


def sum_rows(rows_MD: Tensor, gather_idx_M: Tensor, positions_NK: Tensor) -> Tensor:
    """y[n] = sum of the rows at positions[n]: [N, D] from [M, D]. `gather_idx_M` is the inverse, for the backward."""
    return _SumRows.apply(rows_MD, gather_idx_M, positions_NK)  # type: ignore[return-value]
