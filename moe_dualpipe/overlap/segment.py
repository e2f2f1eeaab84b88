"""Segments: what a layer's generator yields. A layer is written once, as a generator that yields where it communicates.

    def segments(self, x_TD):
        h_TD, rows_TD, weights_TK, ids_TK = yield Compute("attn", self.attend, x_TD)
        route = yield PrepareComm("dispatch", ep.prepare, ids_TK)
        dispatch = Collective(partial(ep.dispatch, route), partial(ep.combine, route))
        received = yield Comm("dispatch", dispatch, rows_TD, weights_TK)                     # returns immediately
        out_ND = yield Compute("mlp", partial(self.experts, route=route), received)          # waits for `received`
        combined = yield Comm("combine", dispatch.transposed, out_ND)
        return (yield Compute("add", torch.add, h_TD, combined))

At each yield, the engine may run segments of another chunk. There are two rules. Compute with tensors that need
gradients only inside a Compute, and pass them as its inputs. Never yield inside a `with` block: it would also apply to
the other chunk.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor

from ..errors import in_context
from ..kernels.weight_grads import WeightGrads

Tensors = tuple[Tensor, ...]


class Transfer(Protocol):
    """A transfer that has started. `wait` returns the received tensors, and None for one that was not sent.

    On CUDA, `wait` makes the current stream wait; on CPU, it blocks. An attribute `completed` may tell that no wait is
    needed.
    """

    def wait(self) -> tuple[Tensor | None, ...]: ...


class _Segment:
    """A function with its inputs. `name` and `layer` (set by `in_layer`) appear in profiles and errors."""

    __slots__ = ("fn", "inputs", "layer", "name")

    def __init__(self, name: str, fn: Callable[..., Any], *inputs: Any):
        self.name, self.fn, self.inputs = name, fn, inputs
        self.layer: int | None = None


class PrepareComm(_Segment):
    """Run `fn(*inputs)` on the communication stream, before the Comm of the same name. The yield returns its result.

    Only that Comm, and segments that use the Comm's result, may use tensors in the result of `fn`.
    """

    __slots__ = ()


class Compute(_Segment):
    """Run `fn(*inputs)`, which returns a tensor or a tuple of tensors.

    recompute: save only the inputs for backward, and run `fn` again just before the backward. source: the user's class
    or function that `fn` runs; an error without a line of it, as in backward, is reported at its definition.
    """

    __slots__ = ("recompute", "source")

    def __init__(
        self, name: str, fn: Callable[..., Any], *inputs: "Tensor | CommResult", recompute: bool = False,
        source: Any = None,
    ):  # fmt: skip
        super().__init__(name, fn, *inputs)
        self.recompute, self.source = recompute, source

    def with_fn(self, fn: Callable[..., Any]) -> "Compute":
        """A copy without inputs, which calls `fn()`. The engine runs such segments."""
        other = Compute(self.name, fn, recompute=self.recompute, source=self.source)
        other.layer = self.layer
        return other


@dataclass(frozen=True, slots=True)
class Collective:
    """A transfer and its dual, the transposed one, such as all-gather and reduce-scatter, or dispatch and combine.

    `start(*inputs) -> Transfer`, and `dual(*output_grads) -> Transfer`, which returns the gradients of the inputs. Both
    run without autograd. joint: other ranks take part, and may need the dual. So it runs even if no input of this rank
    needs a gradient.
    """

    start: Callable[..., Transfer]
    dual: Callable[..., Transfer]
    joint: bool = False

    @property
    def transposed(self) -> "Collective":
        return Collective(self.dual, self.start, self.joint)


class Comm(_Segment):
    """Start a transfer of the inputs. The generator continues immediately, with a `CommResult`; backward runs the dual.

    hide: what else may run behind the transfer and its dual. "weights": deferred weight gradients. "": none; on a GPU,
    they are queued first, unless the other chunk's transfer hides them. opens: how many transfers of another chunk's
    forward are started behind the dual, before the dual's own chunk continues. 0: the forward waits for the next one.
    """

    __slots__ = ("collective", "hide", "opens")
    hide: Literal["weights", ""]

    def __init__(
        self, name: str, collective: Collective, *inputs: "Tensor | CommResult",
        hide: Literal["weights", ""] = "weights", opens: int = 1,
    ):  # fmt: skip
        super().__init__(name, collective.start, *inputs)
        self.collective, self.hide, self.opens = collective, hide, opens

    def with_fn(self, fn: Callable[..., Any]) -> "Comm":
        """A copy without inputs, which calls `fn()`."""
        other = Comm(self.name, self.collective, hide=self.hide, opens=self.opens)
        other.fn, other.layer = fn, self.layer
        return other


class Weights(_Segment):
    """The weight gradients of a Compute, deferred. The engine decides when they run. drop: forget them instead."""

    __slots__ = ("drop",)

    def __init__(self, segment: Compute, weight_grads: WeightGrads, key: object):
        super().__init__(segment.name, partial(weight_grads.run_deferred, key))
        self.layer, self.drop = segment.layer, partial(weight_grads.drop, key)


class CommResult:
    """The future result of a Comm. As an input of a segment, it is replaced by all its tensors, in order."""

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
    """Replace each CommResult among the inputs by its tensors."""
    return tuple(t for i in inputs for t in (i.wait() if isinstance(i, CommResult) else (i,)))


def in_layer(layer: int, segments: Segments, source: Any = None) -> Segments:
    """Yields the segments with `layer` set, and returns their result.

    source: the user's class of this layer; segments that run another one keep it.
    """
    reply = None
    while True:
        try:
            segment = segments.send(reply)
        except StopIteration as stop:
            return stop.value
        except Exception as error:
            in_context(error, f"layer {layer}", source)
            raise
        segment.layer = layer
        if isinstance(segment, Compute):
            segment.source = segment.source or source
        reply = yield segment
