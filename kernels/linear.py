"""`linear`: y = x W^T, with a weight gradient that can be deferred.

The backward of `F.linear` computes the input gradient and the weight gradient together. Here they are separate
products, so a split backward can return the input gradient first and defer the weight gradient (weight_grads.py).

With `fp32`, the products of bf16 tensors are computed in fp32. The tensors are saved for backward in their own dtype,
and cast again there.

D_in, D_out: input and output width; ...: any leading dimensions.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .products import is_onednn_product, product
from .weight_grads import WeightGrads, accumulate, has_hooks


class _LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, weight_grads: WeightGrads | None, fp32: bool) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        # The gradient belongs to this parameter. With checkpointing, ctx.saved_tensors may have another tensor.
        ctx.parameter = weight
        ctx.weight_grads = weight_grads
        ctx.x_dtype = x.dtype
        if not fp32:
            return _times_transposed(x, weight)
        with torch.autocast(x.device.type, enabled=False):
            return _times_transposed(at_least_fp32(x), at_least_fp32(weight))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        (grad,) = grads  # its dtype is that of the product
        x, weight = ctx.saved_tensors

        def weight_grad() -> Tensor:
            dw = product(grad.reshape(-1, grad.shape[-1]).T, x.reshape(-1, x.shape[-1]).to(grad.dtype))
            return dw if grad.dtype == ctx.x_dtype else dw.to(grad_dtype(ctx.parameter))

        wants_x, wants_weight, *_ = ctx.needs_input_grad
        grad_x = _times_transposed(grad, weight.to(grad.dtype).T).to(ctx.x_dtype) if wants_x else None
        grad_weight = compute_or_defer(ctx.weight_grads, ctx.parameter, weight_grad) if wants_weight else None
        return grad_x, grad_weight, None, None


def _times_transposed(x: Tensor, w_OI: Tensor) -> Tensor:
    if not is_onednn_product(x, len(w_OI)):
        return F.linear(x, w_OI)
    return product(x.reshape(-1, x.shape[-1]), w_OI.T).view(*x.shape[:-1], len(w_OI))


def compute_or_defer(
    weight_grads: WeightGrads | None, parameter: Tensor, compute: Callable[[], Tensor],
    add_to: Callable[[Tensor], Any] | None = None, in_place: bool = False,
) -> Tensor | None:  # fmt: skip
    """Return the weight gradient for autograd, or None if it is deferred or already added to `parameter.grad`.

    compute: returns the gradient. add_to: adds the gradient to an existing one in place. in_place: add the gradient to
    `parameter.grad` and return None, unless the parameter has hooks.
    """
    if weight_grads is not None and weight_grads.defers(parameter):
        weight_grads.defer(parameter, compute, add_to)
        return None
    if in_place and not has_hooks(parameter):
        accumulate(parameter, compute, add_to)
        return None
    return compute()


def grad_dtype(parameter: Tensor) -> torch.dtype:
    """The dtype of the gradient of `parameter`. It is fp32 for the bf16 weights of a model in training."""
    traced = torch.compiler.is_dynamo_compiling()  # which knows no grad_dtype
    return (parameter.grad_dtype if parameter.is_leaf and not traced else None) or parameter.dtype


def apply_autocast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Cast both to the autocast dtype if autocast is enabled. The gradient of a cast weight cannot be deferred."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, weight
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), weight.to(dtype)


def linear(x: Tensor, weight: Tensor, weight_grads: WeightGrads | None = None, fp32: bool = False) -> Tensor:
    """Return x W^T.

    x: [..., D_in]; weight: [D_out, D_in]; returns [..., D_out]. weight_grads: defers the weight gradient during a split
    backward; None: never deferred. fp32: compute and return in fp32 (fp64 for fp64 tensors), even under autocast. On a
    GPU, that is TF32 only if the program allows it (`torch.backends.cuda.matmul.allow_tf32`, False by default).
    """
    if not fp32:
        x, weight = apply_autocast(x, weight)
        if (weight_grads is None or not weight_grads.can_defer) and not is_onednn_product(x, len(weight)):
            return F.linear(x, weight)
    return _LinearFunction.apply(x, weight, weight_grads, fp32)  # type: ignore[return-value]


def at_least_fp32(x: Tensor) -> Tensor:
    """`x` in fp32, or in fp64 if it is fp64: scores, angles and losses need that precision in a bf16 model."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
