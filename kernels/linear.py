"""`linear`: y = x W^T, with a weight gradient that can be computed later than the input gradient.

torch's own `F.linear` computes both in one backward. Here the two are separate products, so that a split backward can
return the input gradient at once and hand the weight half to `weight_grads` (see kernels/weight_grads.py).

D_in, D_out: input and output width; ...: any leading dimensions.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .weight_grads import accumulate, has_hooks

if TYPE_CHECKING:
    from .weight_grads import WeightGrads


class _LinearFunction(torch.autograd.Function):
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
        grad_weight = (
            compute_or_defer(ctx.weight_grads, ctx.parameter, weight_grad) if ctx.needs_input_grad[1] else None
        )
        return grad_x, grad_weight, None


def compute_or_defer(
    weight_grads: "WeightGrads | None",
    parameter: Tensor,
    compute: Callable[[], Tensor],
    add_to: Callable[[Tensor], Any] | None = None,
    in_place: bool = False,
) -> Tensor | None:
    """The weight gradient for autograd; None when `weight_grads` takes `compute` to run it later.

    add_to: adds it to a gradient that is there. in_place: add it to `parameter.grad` here, and return None, unless
    hooks wait for it.
    """
    if weight_grads is not None and weight_grads.defers(parameter):
        weight_grads.defer(parameter, compute, add_to)
        return None
    if in_place and not has_hooks(parameter):
        accumulate(parameter, compute, add_to)
        return None
    return compute()


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype that the gradient of `parameter` is kept in: fp32 for the bf16 weights of a model in training."""
    return (parameter.grad_dtype if parameter.is_leaf else None) or parameter.dtype


def check_can_accumulate(name: str, parameter: Tensor) -> None:
    """Raises ValueError for a weight whose gradient cannot be added up in fp32, in its own `.grad`."""
    if not parameter.is_leaf:
        raise ValueError(f"accumulate=True adds to the .grad of {name}, but that is computed from other tensors here")
    if grad_dtype(parameter) not in (torch.float32, torch.float64):
        raise ValueError(
            f"accumulate=True adds in float32, but the gradient of {name} is kept in {grad_dtype(parameter)}: "
            f"set {name}.grad_dtype = torch.float32"
        )


def apply_autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
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
    return _LinearFunction.apply(*apply_autocast(x, weight), weight_grads)  # type: ignore[return-value]
