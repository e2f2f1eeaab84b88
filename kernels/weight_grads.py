"""Weight gradients that are computed later than input gradients.

A split backward (I, then W) sends the input gradient to the previous stage as soon as it exists, and fills a bubble
with the weight gradients afterwards. A layer's autograd function owns both, so it must be told: it hands the weight
half to a `WeightGrads`, as a closure, whenever that object asks for it (`defers`). The object is passed to the layers
that can use it (`bind`); there is no global. A layer that knows nothing of it computes both halves at once and stays
correct.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightGrads:
    """The weight gradients that are owed, keyed as the caller likes: (stage, micro-batch) in the executor."""

    def __init__(self, max_deferred: int | None = None) -> None:
        """max_deferred: the largest number of keys that may be owed. One more, and the oldest is computed at once,
        which bounds the activations that are held for it. Raises ValueError below 1."""
        if max_deferred is not None and max_deferred < 1:
            raise ValueError(f"max_deferred must be at least 1, or None for no bound: got {max_deferred}")
        self.max_deferred = max_deferred
        self._already_run: set[Hashable] = set()
        self._key: Hashable | None = None
        self._deferred: dict[Hashable, list[tuple[Tensor, Callable[[], Tensor], Callable[[Tensor], Any] | None]]] = {}

    def defers(self, parameter: Tensor) -> bool:
        """Whether to `defer` the gradient of `parameter`: a split backward is running, and nobody would notice.

        A hook on the parameter would see a gradient without the deferred part, and a computed weight has no gradient
        to add to; both are left to autograd.
        """
        return self._key is not None and parameter.is_leaf and not has_hooks(parameter)

    @contextmanager
    def defer_to(self, key: Hashable) -> Iterator[None]:
        """Within this context, layers defer their weight gradients; `run_deferred(key)` computes them."""
        if self._key is not None or key in self._deferred:
            raise RuntimeError(f"weight gradients for {key} are already being deferred")
        if self.max_deferred is not None and len(self._deferred) >= self.max_deferred:
            oldest = next(iter(self._deferred))
            self.run_deferred(oldest)
            self._already_run.add(oldest)
        self._key, self._deferred[key] = key, []
        try:
            yield
        except BaseException:
            self.drop(key)
            raise
        finally:
            self._key = None

    def defer(
        self, parameter: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], Any] | None = None
    ) -> None:
        """Called by a layer's backward: `compute` will return what is to be added to the gradient of `parameter`.

        add_to: adds it to a gradient that is there, for layers that can do that faster.
        """
        assert self._key is not None, "defer() outside a split backward"
        self._deferred[self._key].append((parameter, compute, add_to))

    def run_deferred(self, key: Hashable) -> None:
        """Compute all that was deferred to `key`, in the order in which it was deferred."""
        if key in self._already_run:
            self._already_run.remove(key)
            return
        with torch.no_grad():
            for parameter, compute, add_to in self._deferred.pop(key):
                accumulate(parameter, compute, add_to)

    def has_deferred(self, key: Hashable) -> bool:
        """Whether anything was deferred to `key`."""
        return bool(self._deferred.get(key))

    def drop(self, key: Hashable) -> None:
        """Drop what is owed to `key`, after a failure."""
        self._deferred.pop(key, None)

    def clear(self) -> None:
        """Forget what is owed, after a step that failed."""
        self._key = None
        self._already_run.clear()
        self._deferred.clear()

    def __len__(self) -> int:
        return len(self._deferred)


def bind(module: nn.Module, weight_grads: WeightGrads | None) -> None:
    """Give `weight_grads` to every layer inside `module` that can defer: those with an attribute of that name."""
    for layer in module.modules():
        current = getattr(layer, "weight_grads", bind)  # whatever else somebody calls by that name is left alone
        if current is None or isinstance(current, WeightGrads):
            setattr(layer, "weight_grads", weight_grads)  # noqa: B010 - nn.Module declares no such attribute


def has_hooks(parameter: Tensor) -> bool:
    """Whether somebody watches, or changes, the gradients that autograd brings to `parameter`."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def accumulate(parameter: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], Any] | None = None) -> None:
    """Add the result of `compute` to `parameter.grad` as autograd would, in `parameter.grad_dtype`.

    A gradient that is there already is given to `add_to` instead, if there is one.
    """
    if parameter.grad is not None and add_to is not None:
        add_to(parameter.grad)
        return
    grad = compute()
    grad = grad.to(parameter.grad_dtype or grad.dtype)
    if parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad += grad
