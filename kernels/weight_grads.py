"""Deferred weight gradients: compute them later than the input gradients.

A split backward (I, then W) sends the input gradient to the previous stage as soon as it exists, and computes the
weight gradients later, in a bubble. Inside `WeightGrads.defer_to`, the autograd function of a layer computes only its
input gradient, and calls `defer` with a function that computes the weight gradient. `bind` gives a `WeightGrads` to the
layers that can defer. Other layers compute both gradients in I, which is also correct.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightGrads:
    """Deferred weight gradients, by a key that the caller chooses, such as (stage, micro-batch).

    max_deferred: maximum number of deferred keys, which bounds the memory of saved activations; None: no bound. At the
    maximum, `defer_to` first computes the gradients of the oldest key. Raises ValueError below 1.
    late: in an overlapped pair, compute those of the MLP after the other chunk's MLP (overlap/engine.py).
    """

    def __init__(self, max_deferred: int | None = None, late: bool = False) -> None:
        if max_deferred is not None and max_deferred < 1:
            raise ValueError(f"max_deferred must be at least 1, or None for no bound: got {max_deferred}")
        self.max_deferred, self.late = max_deferred, late
        self._already_run: set[Hashable] = set()
        self._key: Hashable | None = None
        self.can_defer = True
        self._deferred: dict[Hashable, list[tuple[Tensor, Callable[[], Tensor], Callable[[Tensor], Any] | None]]] = {}

    def defers(self, parameter: Tensor) -> bool:
        """Whether to `defer` the gradient of `parameter`: only inside `defer_to`, if it is a leaf without hooks.

        A hook would get a gradient without the deferred part. A weight that is not a leaf has no `.grad` to add to.
        """
        return self._key is not None and parameter.is_leaf and not has_hooks(parameter)

    @contextmanager
    def never_defer(self) -> Iterator[None]:
        """For a forward whose backward is not split. Inside this context, `can_defer` is False.

        Layers then use torch's operators, which take less time on the host.
        """
        before, self.can_defer = self.can_defer, False
        try:
            yield
        finally:
            self.can_defer = before

    @contextmanager
    def defer_to(self, key: Hashable) -> Iterator[None]:
        """Inside this context, layers defer their weight gradients. `run_deferred(key)` computes them.

        Raises RuntimeError inside another such context, and if `key` has deferred gradients already.
        """
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
        """Defer a weight gradient; layers call this in backward. `compute()` returns the gradient of `parameter`.

        add_to: adds the gradient to an existing one in place, if the layer can do that faster.
        """
        assert self._key is not None, "defer() outside a split backward"
        self._deferred[self._key].append((parameter, compute, add_to))

    def run_deferred(self, key: Hashable) -> None:
        """Compute the weight gradients of `key`, in the order of deferral, unless `max_deferred` already caused it."""
        if key in self._already_run:
            self._already_run.remove(key)
            return
        for deferred in self._deferred.pop(key):
            with torch.no_grad():
                accumulate(*deferred)

    def has_deferred(self, key: Hashable) -> bool:
        """Whether `key` has deferred weight gradients."""
        return bool(self._deferred.get(key))

    def drop(self, key: Hashable) -> None:
        """Drop the weight gradients of `key`, for use after a failure."""
        self._deferred.pop(key, None)

    def clear(self) -> None:
        """Drop all deferred weight gradients, for use after a failed step."""
        self._key = None
        self._already_run.clear()
        self._deferred.clear()

    def __len__(self) -> int:
        return len(self._deferred)


def bind(module: nn.Module, weight_grads: WeightGrads | None) -> None:
    """Set the attribute `weight_grads` of every layer in `module` that has it, with a WeightGrads or None as value."""
    for layer in module.modules():
        current = getattr(layer, "weight_grads", "no attribute")
        if current is None or isinstance(current, WeightGrads):
            setattr(layer, "weight_grads", weight_grads)  # noqa: B010 - nn.Module declares no such attribute


def has_hooks(parameter: Tensor) -> bool:
    """Whether `parameter` has hooks that read or change the gradients that autograd accumulates."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def accumulate(parameter: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], Any] | None = None) -> None:
    """Add the result of `compute` to `parameter.grad` as autograd would, in `parameter.grad_dtype`.

    If there is a gradient already, and `add_to` is given, call `add_to(gradient)` instead.
    """
    if parameter.grad is not None and add_to is not None:
        add_to(parameter.grad)
        return
    grad = compute()
    grad = grad.to(parameter.grad_dtype or grad.dtype)
    parameter.grad = grad if parameter.grad is None else parameter.grad.add_(grad)
