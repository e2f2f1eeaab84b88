"""Observe what the segments of a module compute, at no cost for modules that are not probed.

Inside `probe`, the functions of the segments are wrapped as the module yields them. Everything else is unchanged:
overlapped pairs, deferred weight gradients, recomputation and transfers run as always.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor, nn

from .segment import Compute, Segments
from .segmented import Segmented
from .tape import needs_grad


class Observed(NamedTuple):
    """What a tensor is to a segment: one of its outputs or inputs, or the gradient of one.

    module: the index of the segment's module among the Segmented ones in the probed module. segment: its index in that
    module, the same for every micro-batch. The gradient of an input is the part that this segment adds.
    """

    module: int
    segment: int
    layer: int | None
    name: str
    is_output: bool
    is_gradient: bool

    def __str__(self) -> str:
        kind = ("output" if self.is_output else "input") + " gradient" * self.is_gradient
        return f"{kind} is that of {'' if self.layer is None else f'layer {self.layer}, '}segment {self.name}"


Observe = Callable[[Observed, Tensor], None]


@contextmanager
def probe(module: nn.Module, observe: Observe) -> Iterator[None]:
    """In this context, `observe` gets every tensor that a Compute of `module` takes or returns, and its gradient.

    If a forward ran in this context, its gradients are observed even if its backward runs later.
    """
    probed = [m for m in module.modules() if isinstance(m, Segmented)]
    for index, segmented in enumerate(probed):
        segmented.segments = partial(_probed, segmented.segments, index, observe)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for segmented in probed:
            del segmented.segments


def _probed(segments: Callable[..., Segments], module: int, observe: Observe, *inputs: Any) -> Segments:
    chunk, reply = segments(*inputs), None
    for index in count():
        try:
            segment = chunk.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(segment, Compute):
            at = partial(Observed, module, index, segment.layer, segment.name)
            segment.fn = partial(_run, segment.fn, at, observe)
        reply = yield segment


def _run(fn: Callable[..., Any], at: Callable[[bool, bool], Observed], observe: Observe, *inputs: Any) -> Any:
    # A view of each input has its own gradient, also if several segments use the input.
    inputs = tuple(t.view_as(t) if needs_grad(t) else t for t in inputs)
    outputs = fn(*inputs)
    for tensors, is_output in ((inputs, False), ((outputs,) if isinstance(outputs, Tensor) else outputs, True)):
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                observe(at(is_output, False), tensor)
            if needs_grad(tensor):
                tensor.register_hook(partial(observe, at(is_output, True)))
    return outputs
