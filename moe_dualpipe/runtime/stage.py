"""One pipeline stage during one step: what a forward saves until its backward runs.

A stage is any module that maps tensors to a tensor or a sequence of tensors. Little is saved for each micro-batch: the
inputs, whose gradients are sent to the previous stage, and the roots of the autograd graph. The outputs are dropped
once they are sent, unless `overlapped_forward_backward` runs the backward: it needs them as an argument.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
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
    gradients of module1's inputs are complete, so that they are sent while it computes the last weight gradients.
    """

    @classmethod
    def overlapped_forward_backward(cls, *arguments: Any, **options: Any) -> tuple[Any, Tensor | None]: ...


def as_tuple(outputs: Tensor | Sequence[Tensor]) -> Tensors:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


@dataclass(frozen=True, slots=True)
class Chunk:
    """One micro-batch between its forward and its backward on this stage.

    roots: one entry for each floating-point output, None if it needs no gradient. outputs: these outputs, if an
    overlapped backward needs them. Both are empty if there is a loss, from which the backward then starts.
    """

    inputs: Tensors
    roots: tuple[GradientEdge | None, ...]
    outputs: Tensors
    loss: Tensor | None


class Stage:
    """Forward and backward of one stage's micro-batches, in any order that respects their dependences."""

    def __init__(
        self, index: int, module: nn.Module, weight_grads: WeightGrads, overlapped: Collection[int] = (),
        whole: Collection[int] = (),
    ):  # fmt: skip
        """overlapped: the micro-batches whose backward is run by the module's `overlapped_forward_backward`.

        whole: those of which neither forward nor backward is overlapped, and whose backward is not split.
        """
        self.index, self.module, self.weight_grads = index, module, weight_grads
        self.overlapped, self.whole = overlapped, whole
        self.chunks: dict[int, Chunk] = {}

    def forward(
        self, micro_batch: int, inputs: Tensors, criterion: Criterion | None, labels: Sequence[Any],
        context: Sequence[Any] = (),
    ) -> tuple[Tensors, Tensor | None]:  # fmt: skip
        """Return the module's outputs and, given a criterion (on the last stage), the loss of this micro-batch.

        context: further arguments of the module, without gradients.
        """
        with self._whole(micro_batch):
            outputs = as_tuple(self.module(*inputs, *context))
            loss = criterion(*outputs, *labels) if criterion is not None else None
        self.save_for_backward(micro_batch, inputs, outputs, loss)
        return outputs, loss

    def save_for_backward(self, micro_batch: int, inputs: Tensors, outputs: Tensors, loss: Tensor | None) -> None:
        """Save what the backward of `micro_batch` needs; nothing if gradients are disabled."""
        if not torch.is_grad_enabled():
            return
        outputs = () if loss is not None else tuple(o for o in outputs if o is not None and o.is_floating_point())
        roots = tuple(get_gradient_edge(output) if output.requires_grad else None for output in outputs)
        self.chunks[micro_batch] = Chunk(inputs, roots, outputs if micro_batch in self.overlapped else (), loss)

    def backward(self, micro_batch: int, output_grads: Tensors, split: bool) -> Tensors:
        """Run backward and return the input gradients. `split` leaves the weight gradients to `backward_weights`."""
        chunk = self.chunks[micro_batch]
        with self.weight_grads.defer_to((self.index, micro_batch)) if split else self._whole(micro_batch):
            if chunk.loss is not None:
                chunk.loss.backward()
            elif pairs := [(r, g) for r, g in zip(chunk.roots, output_grads, strict=True) if r is not None]:
                roots, grads = zip(*pairs, strict=True)
                torch.autograd.backward(roots, grads)
        return self.finish_backward(micro_batch)

    def _whole(self, micro_batch: int) -> AbstractContextManager[None]:
        """The context of forward and backward, which may run the forward again."""
        return self.weight_grads.never_defer() if micro_batch in self.whole else nullcontext()

    def finish_backward(self, micro_batch: int) -> Tensors:
        """Drop the graph. Returns the input gradients (none on the first stage), and zeros for an unused input."""
        inputs = self.chunks.pop(micro_batch).inputs
        if self.index == 0:
            return ()
        return tuple(t.grad if t.grad is not None else torch.zeros_like(t) for t in inputs if t.is_floating_point())

    def backward_weights(self, micro_batch: int) -> None:
        """Compute the weight gradients that a split backward deferred."""
        self.weight_grads.run_deferred((self.index, micro_batch))
