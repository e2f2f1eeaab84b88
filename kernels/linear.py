"""`linear`: y = x W^T, with a weight gradient that can be computed later than the input gradient.

torch's own `F.linear` computes both in one backward. Here the two are separate products, so that a split backward can
return the input gradient at once and hand the weight half to `weight_grads` (see overlap/weight_grads.py).

D_in, D_out: input and output width; ...: any leading dimensions.
"""

from collections.abc import Callable
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
        # What is saved may come back as another tensor (checkpointing); a gradient is added to the parameter itself.
        ctx.parameter = weight
        ctx.weight_grads = weight_grads
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors

        def weight_grad() -> Tensor:
            return grad.reshape(-1, grad.shape[-1]).T @ x.reshape(-1, x.shape[-1])

        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = later_or_now(ctx.weight_grads, ctx.parameter, weight_grad) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def later_or_now(weight_grads: "WeightGrads | None", parameter: Tensor, compute: Callable[[], Tensor]) -> Tensor | None:
    """The weight gradient for autograd; None when `weight_grads` takes `compute` to run it later."""
    if weight_grads is not None and weight_grads.defers(parameter):
        weight_grads.defer(parameter, compute)
        return None
    return compute()


def autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the autocast dtype, where autocast is on; a cast weight's gradient is not deferred."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype)


def linear(x: Tensor, weight: Tensor, weight_grads: "WeightGrads | None" = None) -> Tensor:
    """Return x W^T.

    x: [..., D_in]; weight: [D_out, D_in]; returns [..., D_out]. While `weight_grads` defers, backward leaves the
    weight's gradient to it.
    """
    return _Linear.apply(*autocast(x, weight), weight_grads)  # type: ignore[return-value]
