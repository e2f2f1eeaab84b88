"""What a chunk yields: a layer is written once, as a generator that stops where it communicates.

    def segments(self, x_TD):
        h_TD, rows_TD, weights_TK, ids_TK = yield Compute("attn", self.attend, x_TD)
        route = yield PrepareComm("dispatch", ep.prepare, ids_TK)
        received = yield Comm("dispatch", send, send_backward, rows_TD, weights_TK)    # comes back at once ...
        out_ND = yield Compute("mlp", partial(self.experts, route=route), received)     # ... and is waited for here
        combined = yield Comm("combine", bring, bring_backward, out_ND)
        return (yield Compute("add", torch.add, h_TD, combined))

Whoever drives the generator decides what runs meanwhile: nothing in a plain forward, another chunk in the engine. Two
rules follow. Tensors that need gradients are computed with inside a Compute only, and reach it as its inputs; and a
generator never yields inside a `with` block, whose effect would leak into the other chunk.
"""

from collections.abc import Callable, Generator
from copy import copy
from typing import Any, Protocol, Self

from torch import Tensor

Tensors = tuple[Tensor, ...]


class Transfer(Protocol):
    """A transfer on its way; `wait` returns its tensors (or None for one that does not travel).

    It waits on the stream on CUDA, and blocks on CPU. Its attribute `completed` is true if no wait is needed.
    """

    def wait(self) -> tuple[Tensor | None, ...]: ...


class _Segment:
    """`fn`, what to call it with, and two things for people: a name, and the layer (set by `in_layer`)."""

    __slots__ = ("fn", "inputs", "layer", "name")

    def __init__(self, name: str, fn: Callable[..., Any], *inputs: Any):
        self.name, self.fn, self.inputs = name, fn, inputs
        self.layer: int | None = None

    def with_fn(self, fn: Callable[..., Any]) -> Self:
        """The same segment for an engine, which only calls `fn()`."""
        other = copy(self)
        other.fn, other.inputs = fn, ()
        return other


class PrepareComm(_Segment):
    """Run `fn(*inputs)` at once where communication runs, before the Comm of that name; it returns anything. Tensors in
    it are for that Comm, and for what uses the Comm's result."""

    __slots__ = ()


class Compute(_Segment):
    """Run `fn(*inputs)`, which returns a tensor or a tuple of tensors. `recompute`: keep only the inputs for its
    backward, and run it again just before."""

    __slots__ = ("recompute",)

    def __init__(self, name: str, fn: Callable[..., Any], *inputs: "Tensor | CommResult", recompute: bool = False):
        super().__init__(name, fn, *inputs)
        self.recompute = recompute


class Comm(_Segment):
    """Start a transfer, `fn(*inputs) -> Transfer`; the generator goes on at once, with an `CommResult`.

    `back(*output_grads) -> Transfer` starts the transfer of the gradients back to the inputs. Both are autograd-free.
    `weights_first`: on a device that is queued for, weight gradients are queued before this is started.
    """

    __slots__ = ("back", "weights_first")

    def __init__(
        self,
        name: str,
        fn: Callable[..., Transfer],
        back: Callable[..., Transfer],
        *inputs: "Tensor | CommResult",
        weights_first: bool = False,
    ):
        super().__init__(name, fn, *inputs)
        self.back, self.weights_first = back, weights_first


class CommResult:
    """Stands for the tensors of a Comm until they are there. As an input it becomes all of them, in order."""

    __slots__ = ("_tensors", "_wait")

    def __init__(self, wait: Callable[[], Tensors]):
        self._wait: Callable[[], Tensors] | None = wait
        self._tensors: Tensors = ()

    def wait(self) -> Tensors:
        if self._wait is not None:
            self._tensors, self._wait = self._wait(), None
        return self._tensors


Segments = Generator[PrepareComm | Compute | Comm, Any, Any]


def wait_for_inputs(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Wait for what is arriving among the inputs, and put its tensors in its place."""
    return tuple(t for i in inputs for t in (i.wait() if isinstance(i, CommResult) else (i,)))


def in_layer(layer: int, segments: Segments) -> Segments:
    """The same segments, known to belong to `layer` of the model."""
    answer = None
    while True:
        try:
            segment = segments.send(answer)
        except StopIteration as stop:
            return stop.value
        segment.layer = layer
        answer = yield segment
