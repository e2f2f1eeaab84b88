"""One pipeline stage during one step: what a forward saves until its backward runs.

A stage is any module that maps tensors to a tensor or a sequence of tensors. Little is saved per micro-batch: the
inputs, which receive the gradients for the previous stage, and the roots of the autograd graph. The outputs are dropped
once they are sent (the graph holds what it needs), except where `overlapped_forward_backward` runs the backward: it
gets them as an argument.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..kernels.weight_grads import WeightGrads

Criterion = Callable[..., Tensor]
Tensors = tuple[Tensor, ...]


@runtime_checkable
class OverlappedModule(Protocol):
    """A module class that runs the forward of one micro-batch and the backward of another in one call.

    The arguments are DeepSeek's: (module0, inputs0, criterion0, labels0, module1, loss1, outputs1, output_grads1). The
    method returns the outputs and the loss of the forward; the loss is None without `criterion0`.

    It may also have a keyword argument `on_input_grads`. Then it must call `on_input_grads()` once, as soon as the
    gradients of module1's inputs are complete: they are sent while it computes the last weight gradients.
    """

    @classmethod
    def overlapped_forward_backward(cls, *arguments: Any, **options: Any) -> tuple[Any, Tensor | None]: ...


def accepts_on_input_grads(method: Callable[..., Any]) -> bool:
    """Whether an `overlapped_forward_backward` has the keyword argument `on_input_grads`."""
    return "on_input_grads" in signature(method).parameters


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> Tensors:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def accumulate_gradients(roots: Sequence[Tensor | GradientEdge], grads: Sequence[Tensor]) -> None:
    """Accumulate gradients from `roots`. Unlike `torch.autograd.backward`, allow inputs that no root depends on."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(roots), tuple(grads), keep_graph=False, create_graph=False, allow_unreachable=True, accumulate_grad=True
    )


@dataclass(frozen=True, slots=True)
class Chunk:
    """One micro-batch between its forward and its backward on this stage.

    roots: one entry for each output that can have a gradient. outputs: the outputs, if an overlapped backward needs
    them. Both are empty on the last stage, where the backward starts from the loss.
    """

    inputs: Tensors
    roots: tuple[GradientEdge | None, ...]
    outputs: Tensors
    loss: Tensor | None


class Stage:
    """Forward and backward of one stage's micro-batches, in any order that respects their dependences."""

    def __init__(self, index: int, module: nn.Module, weight_grads: WeightGrads, overlapped: Collection[int] = ()):
        """overlapped: the micro-batches whose backward is run by the module's `overlapped_forward_backward`."""
        self.index = index
        self.module = module
        self.weight_grads = weight_grads
        self.overlapped = overlapped
        self.chunks: dict[int, Chunk] = {}

    def forward(
        self, micro_batch: int, inputs: Tensors, criterion: Criterion | None, labels: Tensors
    ) -> tuple[Tensors, Tensor | None]:
        """Return the module's outputs and, given a criterion (on the last stage), the loss of this micro-batch."""
        outputs = as_tuple(self.module(*inputs))
        loss = criterion(*outputs, *labels) if criterion is not None else None
        self.save_for_backward(micro_batch, inputs, outputs, loss)
        return outputs, loss

    def save_for_backward(self, micro_batch: int, inputs: Tensors, outputs: Tensors, loss: Tensor | None) -> None:
        """Save what the backward of `micro_batch` needs; without autograd, nothing."""
        if not torch.is_grad_enabled():
            return
        outputs = () if loss is not None else tuple(output for output in outputs if output.is_floating_point())
        roots = tuple(get_gradient_edge(output) if output.requires_grad else None for output in outputs)
        self.chunks[micro_batch] = Chunk(inputs, roots, outputs if micro_batch in self.overlapped else (), loss)

    def backward(self, micro_batch: int, output_grads: Tensors, split: bool) -> Tensors:
        """Run backward and return the input gradients. `split` leaves the weight gradients to `backward_weights`."""
        if split:
            with self.weight_grads.defer_to((self.index, micro_batch)):
                self._backward(self.chunks[micro_batch], output_grads)
        else:
            self._backward(self.chunks[micro_batch], output_grads)
        return self.finish_backward(micro_batch)

    def _backward(self, chunk: Chunk, output_grads: Tensors) -> None:
        if chunk.loss is not None:
            chunk.loss.backward()
            return
        pairs = [(root, grad) for root, grad in zip(chunk.roots, output_grads, strict=True) if root is not None]
        if pairs:
            accumulate_gradients([root for root, _ in pairs], [grad for _, grad in pairs])

    def finish_backward(self, micro_batch: int) -> Tensors:
        """Drop the graph; return the input gradients (none on the first stage), zeros for an unused input."""
        chunk = self.chunks.pop(micro_batch)
        if self.index == 0:
            return ()
        return tuple(
            tensor.grad if tensor.grad is not None else torch.zeros_like(tensor)
            for tensor in chunk.inputs
            if tensor.is_floating_point()
        )

    def backward_weights(self, micro_batch: int) -> None:
        """Compute the weight gradients that a split backward deferred."""
        self.weight_grads.run_deferred((self.index, micro_batch))
