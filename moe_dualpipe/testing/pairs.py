"""Two micro-batches at a time: as in a pipeline, one after the other, both in flight, or overlapped."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor

from ..messages import plural
from .laws import Broken
from .subject import random_like, relative

Way = Literal["one after the other", "two forwards, then two backwards", "overlapped"]


def compare_overlapped(module: Any, first: Tensor, second: Tensor, prefix: str = "") -> str:
    """Bit-equality of sequential and other runs of two inputs. prefix: of the parameters that are compared.

    Raises Broken at the first difference.
    """
    expected = [*_run(module, first, second, "one after the other", prefix)]
    ways: tuple[Way, ...] = "two forwards, then two backwards", "overlapped"
    for way in ways:
        for (name, wanted), (_, found) in zip(expected, _run(module, first, second, way, prefix), strict=True):
            if wanted is None and found is None:
                continue
            if wanted is None or found is None or not torch.equal(found, wanted):
                size = f"by {relative(found, wanted):.1e}" if wanted is not None and found is not None else "in being"
                raise Broken(
                    f"{name} differs {size} if two micro-batches are in flight ({way}): forward keeps tensors for "
                    "backward in `self` or in a global variable, and the other micro-batch overwrites them. Keep them "
                    "in `ctx` of the autograd function"
                )
    return f"{plural(len(expected), 'tensor')}, bit-equal"


def _run(module: Any, first: Tensor, second: Tensor, way: Way, prefix: str) -> Iterator[tuple[str, Tensor | None]]:
    """Forward and backward of both inputs: results and gradients by name."""
    module.zero_grad()
    a, b = (x.clone().requires_grad_() for x in (first, second))
    v = random_like(a, 7)

    def loss_of(y: Tensor) -> Tensor:
        return (y * v).sum()

    loss = loss_of(module(a))
    if way == "one after the other":
        loss.backward()
    if way == "overlapped":
        y, last = module.overlapped_forward_backward(module, [b], loss_of, [], module, loss, None, None)
        y = y[0] if isinstance(y, tuple) else y
    else:
        y = module(b)
        last = loss_of(y)
    if way == "two forwards, then two backwards":
        loss.backward()
    last.backward()
    yield "the result of the second micro-batch", y.detach()
    yield "the input gradient of the first micro-batch", a.grad
    yield "the input gradient of the second micro-batch", b.grad
    for name, parameter in module.named_parameters():
        if name.startswith(prefix):
            yield f"the gradient of {name.removeprefix(prefix)}", parameter.grad
    module.zero_grad()
