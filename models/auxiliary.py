"""Losses that train a part of the model from the inside, without passing through the pipeline.

What balances a router, or predicts further ahead, adds a term to the loss. To carry that term to the last stage, every
stage would have to pass it on. But the loss is only their sum, so its gradient with respect to each term is 1, wherever
the term was computed: `attach` feeds it in there, with the backward of a tensor that the loss depends on anyway.
"""

from typing import Any

import torch
from torch import Tensor


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *losses: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [(loss.dtype, loss.device) for loss in losses]
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[0], *(torch.ones((), dtype=dtype, device=device) for dtype, device in ctx.dtypes)


def attach(x: Tensor, *losses: Tensor) -> Tensor:
    """`x` itself; its backward also runs that of the scalar `losses`, as if they had been added to the loss.

    To be used where the loss is what `backward()` starts from, with gradient 1: whoever scales the loss before that
    must scale these, too; scaling gradients afterwards scales all alike. The idea is that of Megatron-LM's auxiliary
    loss scaler.

    Example: y = attach(x, 3 * w); (2 * y).backward() gives x.grad = 2 and w.grad = 3.
    """
    return _Attach.apply(x, *losses) if losses else x  # type: ignore[return-value]
