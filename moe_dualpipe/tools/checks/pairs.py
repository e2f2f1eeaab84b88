"""Run two micro-batches as a pipeline does: one after the other, or overlapped, with both in flight."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ...expert_parallel import Local, Route
from ...expert_parallel.exchange import AsyncResult
from ...messages import plural
from .laws import Broken
from .subject import random_like, relative

Way = Literal["one after the other", "forward with backward", "forward with forward"]


class Interleaved(Local):
    """A single rank whose transfers are not complete immediately, so the engine interleaves as with several ranks."""

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Any:
        return AsyncResult([], super().dispatch(x_TD, route, weights_TK).wait)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Any:
        return AsyncResult([], super().combine(y_ND, route, weight_grads_NK).wait)


def compare_overlapped(module: Any, first: Tensor, second: Tensor, prefix: str = "") -> str:
    """Check that all ways to run two inputs are bit-equal. prefix: compare only parameters whose names start with it.

    Raises Broken at the first difference.
    """
    expected = [*_run(module, first, second, "one after the other", prefix)]
    ways: tuple[Way, ...] = "forward with backward", "forward with forward"
    for way in ways:
        for (name, wanted), (_, found) in zip(expected, _run(module, first, second, way, prefix), strict=True):
            if wanted is None and found is None:
                continue
            if wanted is None or found is None or not torch.equal(found, wanted):
                size = "" if wanted is None or found is None else f" by {relative(found, wanted):.1e}"
                raise Broken(
                    f"{name} differs{size} if two micro-batches are in flight ({way}): forward keeps tensors for "
                    "later in `self` or in a global variable, and the other micro-batch overwrites them. Pass "
                    "them on as outputs, or save them in `ctx` of an autograd function"
                )
    return f"{plural(len(expected), 'tensor')}, bit-equal"


def _run(module: Any, first: Tensor, second: Tensor, way: Way, prefix: str) -> Iterator[tuple[str, Tensor | None]]:
    """Forward and backward of both inputs: results and gradients by name."""
    module.zero_grad()
    a, b = (x.clone().requires_grad_() for x in (first, second))
    v = random_like(a, 7)

    def loss_of(y: Tensor) -> Tensor:
        return (y * v).sum()

    if way == "forward with forward":
        y_a, y_b = module.interleaved_forward(module, [a], module, [b])
        loss_of(y_a).backward()
    elif way == "forward with backward":
        y_a = module(a)
        y_b = module.overlapped_forward_backward(module, [b], None, None, module, loss_of(y_a), None, None)[0]
    else:
        y_a = module(a)
        loss_of(y_a).backward()
        y_b = module(b)
    loss_of(y_b).backward()
    yield "the result of the first micro-batch", y_a.detach()
    yield "the result of the second micro-batch", y_b.detach()
    yield "the input gradient of the first micro-batch", a.grad
    yield "the input gradient of the second micro-batch", b.grad
    for name, parameter in module.named_parameters():
        if name.startswith(prefix):
            yield f"the gradient of {name.removeprefix(prefix)}", parameter.grad
    module.zero_grad()
