"""Observe what the segments of a module compute, at no cost for modules that are not probed.

Inside `probe`, the functions of the segments are wrapped as the module yields them. Everything else is unchanged:
overlapped pairs, deferred weight gradients, recomputation and transfers run as always.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...expert_parallel.exchange import AsyncResult
from ...overlap.labels import PREPARE
from ...overlap.segment import Comm, Compute, PrepareComm, Segments, Transfer
from ...overlap.segmented import Segmented
from ...overlap.tape import needs_grad


class Observed(NamedTuple):
    """What a tensor is to a segment: one of its outputs or inputs, or the gradient of one.

    module: the index of the segment's module among the Segmented ones in the probed module. segment: its index in that
    module, the same for every micro-batch. index: which of the inputs or outputs it is. chunk: the number of forwards
    of the module that began earlier inside `probe`. The gradient of a Compute's input is the part that this Compute
    adds.
    """

    module: int
    segment: int
    layer: int | None
    name: str
    is_output: bool
    is_gradient: bool
    index: int = 0
    chunk: int = 0

    def __str__(self) -> str:
        kind = ("output" if self.is_output else "input") + " gradient" * self.is_gradient
        return f"{kind} is that of {'' if self.layer is None else f'layer {self.layer}, '}segment {self.name}"


Observe = Callable[[Observed, Tensor], None]


@contextmanager
def probe(module: nn.Module, observe: Observe) -> Iterator[None]:
    """In this context, `observe` gets every tensor that a segment of `module` takes or returns, and its gradient.

    Of a PrepareComm, these are only its inputs. If a forward ran in this context, its gradients are observed even if
    its backward runs later. A Compute that is recomputed in backward is observed again.
    """
    probed = [m for m in module.modules() if isinstance(m, Segmented)]
    for index, segmented in enumerate(probed):
        segmented.segments = partial(_probed, segmented.segments, index, count(), observe)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for segmented in probed:
            del segmented.segments


def _probed(
    segments: Callable[..., Segments], module: int, chunks: Iterator[int], observe: Observe, *inputs: Any
) -> Segments:
    chunk, number, reply = segments(*inputs), next(chunks), None
    for index in count():
        try:
            segment = chunk.send(reply)
        except StopIteration as stop:
            return stop.value
        at = Observed(module, index, segment.layer, segment.name, False, False, chunk=number)
        match segment:
            case Compute():
                segment.fn = partial(_run, segment.fn, at, observe)
            case Comm():
                segment.fn = partial(_ObservedTransfer, segment.fn, at, observe)
                dual = partial(_ObservedTransfer, segment.collective.dual, at._replace(is_gradient=True), observe)
                segment.collective = replace(segment.collective, dual=dual)
            case PrepareComm():
                at = at._replace(name=PREPARE + segment.name)
                segment.fn = partial(_run_prepare, segment.fn, at, observe)
        reply = yield segment


def _run(fn: Callable[..., Any], at: Observed, observe: Observe, *inputs: Any) -> Any:
    # A view of each input has its own gradient, also if several segments use the input.
    inputs = tuple(t.view_as(t) if needs_grad(t) else t for t in inputs)
    outputs = fn(*inputs)
    for is_output, tensors in ((False, inputs), (True, (outputs,) if isinstance(outputs, Tensor) else outputs)):
        _see(tensors, at._replace(is_output=is_output), observe)
        for index, tensor in enumerate(tensors):
            if needs_grad(tensor):
                of_tensor = at._replace(is_output=is_output, is_gradient=True, index=index)
                tensor.register_hook(partial(observe, of_tensor))
    return outputs


def _run_prepare(fn: Callable[..., Any], at: Observed, observe: Observe, *inputs: Any) -> Any:
    _see(inputs, at, observe)
    return fn(*inputs)


class _ObservedTransfer(AsyncResult[tuple[Tensor | None, ...]]):
    """A transfer in forward, or one of gradients in backward, where its arguments are the gradients of outputs."""

    def __init__(self, fn: Callable[..., Transfer], at: Observed, observe: Observe, *tensors: Any):
        _see(tensors, at._replace(is_output=at.is_gradient), observe)
        transfer = fn(*tensors)
        self.completed: bool = getattr(transfer, "completed", False)
        super().__init__([], partial(_received, transfer, at._replace(is_output=not at.is_gradient), observe))


def _received(transfer: Transfer, at: Observed, observe: Observe) -> tuple[Tensor | None, ...]:
    tensors = transfer.wait()
    _see(tensors, at, observe)
    return tensors


def _see(tensors: Sequence[Any], at: Observed, observe: Observe) -> None:
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor):
            observe(at._replace(index=index), tensor)
