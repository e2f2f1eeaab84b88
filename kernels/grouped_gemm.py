"""`grouped_linear`: one linear layer per expert, over rows that are grouped by expert.

The expert MLP of a Mixture-of-Experts layer is many small products whose sizes only the router knows. With the rows in
expert-major order they are one grouped product:

    offsets = [0, 2, 2, 3]          expert 0 has rows 0-1, expert 1 none, expert 2 row 2
    y[0:2] = x[0:2] W[0]^T,         y[2:3] = x[2:3] W[2]^T

This is the plain-torch operator, on `torch.nn.functional.grouped_mm` where it can be used (on CUDA in bf16 it needs no
host sync), else a loop over experts. As in `linear`, the weight gradient is a product of its own that a split backward
can put off.

M rows, I input width, O output width, E experts.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_dualpipe.kernels.linear import autocast, later_or_now

if TYPE_CHECKING:
    from moe_dualpipe.overlap.weight_grads import WeightGrads


_GROUPED_MM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def grouped_mm(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    """One product per expert e, over the rows from ends_E[e - 1] to ends_E[e]; ends_E is int32 and ends with M.

    b [E, I, O]: a is [M, I], the result [M, O], expert by expert. b [M, O]: a is [I, M], the result [E, I, O], zero
    where an expert has no rows.
    """
    if a.dtype in _GROUPED_MM_DTYPES and _fits_grouped_mm(a) and _fits_grouped_mm(b):
        return F.grouped_mm(a, b, offs=ends_E)
    ends = ends_E.tolist()
    ranges = list(zip([0, *ends], ends, strict=False))
    if b.ndim == 3:
        return torch.cat([a[start:end] @ b[e] for e, (start, end) in enumerate(ranges)])
    return torch.stack([a[:, start:end] @ b[start:end] for start, end in ranges])


def _fits_grouped_mm(t: Tensor) -> bool:
    """Rows or columns are contiguous, and a multiple of 16 bytes apart."""
    (rows, columns), (down, across) = t.shape[-2:], t.stride()[-2:]
    apart, length = (down, columns) if across == 1 else (across, rows)
    return 1 in (down, across) and apart >= length and apart * t.element_size() % 16 == 0


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, w_EOI: Tensor, ends_E: Tensor, weight_grads: "WeightGrads | None") -> Tensor:
        ctx.save_for_backward(x_MI, w_EOI, ends_E)
        ctx.parameter = w_EOI
        ctx.weight_grads = weight_grads
        return grouped_mm(x_MI, w_EOI.mT, ends_E)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_MO = grads[0].contiguous()
        x_MI, w_EOI, ends_E = ctx.saved_tensors

        def weight_grad() -> Tensor:
            return grouped_mm(grad_MO.mT, x_MI, ends_E)

        grad_x = grouped_mm(grad_MO, w_EOI, ends_E) if ctx.needs_input_grad[0] else None
        grad_w = later_or_now(ctx.weight_grads, ctx.parameter, weight_grad) if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None, None


def grouped_linear(
    x_MI: Tensor, w_EOI: Tensor, expert_offsets: Tensor, weight_grads: "WeightGrads | None" = None
) -> Tensor:
    """Return y_MO with y[m] = W[e] x[m] for the rows m of each expert e.

    x_MI: [M, I], grouped by expert; w_EOI: [E, O, I]; expert_offsets: [E + 1] int32, from 0 to M. While `weight_grads`
    defers, backward leaves the weight's gradient to it. Raises ValueError when the shapes do not fit.
    """
    if x_MI.ndim != 2 or w_EOI.ndim != 3 or x_MI.shape[1] != w_EOI.shape[2]:
        raise ValueError(f"grouped_linear needs x [M, I] and w [E, O, I]: got {[*x_MI.shape]} and {[*w_EOI.shape]}")
    if expert_offsets.shape != (w_EOI.shape[0] + 1,) or expert_offsets.dtype != torch.int32:
        raise ValueError(
            f"{w_EOI.shape[0]} experts need {w_EOI.shape[0] + 1} offsets in int32: "
            f"got {[*expert_offsets.shape]} in {expert_offsets.dtype}"
        )
    if not expert_offsets.is_cuda and expert_offsets[-1] != len(x_MI):  # on a GPU the look would be a host sync
        raise ValueError(f"the last offset must be the number of rows: got {int(expert_offsets[-1])} of {len(x_MI)}")
    return _GroupedLinear.apply(*autocast(x_MI, w_EOI), expert_offsets[1:], weight_grads)  # type: ignore[return-value]
