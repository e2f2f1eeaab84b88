"""`linear`: y = x W^T, with a weight gradient that can be computed later than the input gradient.

torch's own `F.linear` computes both in one backward. Here the two are separate products, so that a split backward can
return the input gradient at once and hand the weight half to `weight_grads` (see overlap/weight_grads.py).

D_in, D_out: input and output width; ...: any leading dimensions.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from moe_dualpipe.overlap.weight_grads import WeightGrads


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_grads: "WeightGrads | None") -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight_grads = weight_grads
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors

        def weight_grad() -> Tensor:
            return grad.flatten(0, -2).T @ x.flatten(0, -2)

        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None, None
        if ctx.weight_grads is not None and ctx.weight_grads.deferring:
            ctx.weight_grads.defer(weight, weight_grad)
            return grad_x, None, None
        return grad_x, weight_grad(), None


def linear(x: Tensor, weight: Tensor, weight_grads: "WeightGrads | None" = None) -> Tensor:
    """Return x W^T.

    x: [..., D_in]; weight: [D_out, D_in]; returns [..., D_out]. While `weight_grads` defers, backward leaves the
    weight's gradient to it.
    """
    return _Linear.apply(x, weight, weight_grads)  # type: ignore[return-value]
