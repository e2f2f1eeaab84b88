"""The tape: what a chunk's forward leaves so that its backward can be walked segment by segment, with another chunk
between.

Each Compute builds an autograd graph of its own. What it hands to later segments is cut off from that graph by a slot,
an autograd node without data that collects the gradient. Backward takes the segments that nothing waits for, last one
first: a Compute is `torch.autograd.backward` from the gradients in its slots, a Comm is the transfer the other way.
Only graphs and slots are kept: activations live as long as autograd wants them, and no longer.

While a gradient travels, a Compute that does not depend on it runs first (the shared expert, behind the combine).
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from .segment import Comm, CommResult, Compute, Segments, Tensors, wait_for_inputs


class Slot:
    """The gradient of one tensor that passed between segments; `entry` is the index of its producer."""

    __slots__ = ("closed", "entry", "grad", "like")

    def __init__(self, entry: int, like: Tensor):
        self.entry, self.closed = entry, False
        self.grad: Tensor | None = None
        self.like = like.shape, like.dtype, like.device

    def add(self, grad: Tensor | None) -> None:
        if self.closed:
            raise RuntimeError(
                "a segment used a tensor that is not among its inputs: pass every tensor that needs a gradient as an "
                "input of the Compute or Comm that uses it"
            )
        if grad is not None:
            self.grad = grad if self.grad is None else self.grad + grad

    def close(self, dense: bool = False) -> Tensor | None:
        """The gradient, once it is complete; `dense`: zeros where nothing arrived."""
        grad, self.grad, self.closed = self.grad, None, True
        return torch.zeros(self.like[0], dtype=self.like[1], device=self.like[2]) if dense and grad is None else grad


class _Cut(torch.autograd.Function):
    """Data without its past, and a node that puts the gradient into a slot."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, slot: Slot, _anchor: Tensor) -> Tensor:
        ctx.slot = slot
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.slot.add(grads[0])
        return None, None, None


class _TapeEntry:
    """One segment on the tape: the segment that goes `back`, the roots of a Compute's graph, and the slots of inputs
    and outputs. `used` are the entries whose outputs it uses; `users` counts those that use its own and have not handed
    back their gradients. Inputs and functions are not here: they hold activations.
    """

    __slots__ = ("back", "input_slots", "roots", "slots", "used", "users")

    def __init__(self, segment: Compute | Comm | None = None, inputs: Sequence[Any] = ()):
        self.back = segment.with_fn(segment.back if isinstance(segment, Comm) else _run) if segment else None
        self.input_slots = [_slot_of(t) for t in inputs]
        self.used = {slot.entry for slot in self.input_slots if slot is not None}
        self.users = 0
        self.slots: list[Slot] = []
        self.roots: list[GradientEdge] = []


class Tape:
    """One chunk: `forward` records, where gradients are enabled, and `backward` may be walked once.

    Both are segments without inputs, ready to be run in the order in which they come.
    """

    def __init__(self, inputs: Sequence[Any]):
        self.inputs = tuple(inputs)
        self.recording = torch.is_grad_enabled()
        self.entries = [_TapeEntry()]  # the first stands for the inputs
        self.remaining: set[int] = set()
        self.in_flight: dict[object, CommResult] = {}
        self.anchor = torch.empty(0, requires_grad=True)  # makes autograd see a node whose inputs need no gradient
        self.output_slots: list[Slot | None] = []

    # ---- Forward ----

    def forward(self, segments: Callable[..., Segments]) -> Segments:
        """Drive the chunk's generator; returns its outputs as a tuple, and whether it was a single tensor."""
        chunk, answer = (
            segments(*(self._cut(0, i) if self.recording and _needs_grad(i) else i for i in self.inputs)),
            None,
        )
        while True:
            try:
                segment = chunk.send(answer)
            except StopIteration as stop:
                single = not isinstance(stop.value, tuple | list)
                outputs = wait_for_inputs((stop.value,) if single else tuple(stop.value))
                if any(isinstance(output, tuple | list | dict) for output in outputs):
                    kind = type(stop.value).__name__
                    raise TypeError(f"segments() must return a tensor or a flat tuple: got {kind}") from None
                for unused in list(self.in_flight.values()):
                    unused.wait()
                end = self._append(_TapeEntry(None, outputs)) if self.recording else 0
                self.output_slots = self.entries[end].input_slots
                return outputs, single
            match segment:
                case Compute():
                    answer = yield segment.with_fn(partial(self._compute, segment))
                case Comm():
                    answer = yield from self._comm(segment)
                case _:
                    answer = yield segment

    def _compute(self, segment: Compute) -> Any:
        inputs = wait_for_inputs(segment.inputs)
        if not self.recording:
            return segment.fn(*inputs)
        index = self._append(_TapeEntry(segment, inputs))
        fn = partial(checkpoint, segment.fn, use_reentrant=False) if segment.recompute else segment.fn
        outputs = fn(*inputs)
        handed = []
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            if output.requires_grad:
                self.entries[index].roots.append(get_gradient_edge(output))
                output = self._cut(index, output)
            handed.append(output)
        return handed[0] if isinstance(outputs, Tensor) else tuple(handed)

    def _comm(self, segment: Comm) -> Segments:
        inputs = wait_for_inputs(segment.inputs)
        # One whose inputs need no gradient has no way back.
        index = self._append(_TapeEntry(segment, inputs)) if self.recording and any(map(_needs_grad, inputs)) else 0
        arriving: CommResult = yield segment.with_fn(partial(segment.fn, *(t.detach() for t in inputs)))
        del segment, inputs
        key = object()
        self.in_flight[key] = there = CommResult(lambda: self._arrived(index, arriving.wait(), key))
        return there

    def _arrived(self, index: int, tensors: tuple[Tensor | None, ...], key: object) -> Tensors:
        """What came for a Comm needs gradients if an input of it does."""
        del self.in_flight[key]
        here = [t for t in tensors if t is not None]
        return tuple(self._cut(index, t) if index and (t.is_floating_point() or t.is_complex()) else t for t in here)

    def _append(self, entry: _TapeEntry) -> int:
        for used in entry.used:
            self.entries[used].users += 1
        self.entries.append(entry)
        self.remaining.add(len(self.entries) - 1)
        return len(self.entries) - 1

    def _cut(self, index: int, output: Tensor) -> Tensor:
        slot = Slot(index, output)
        self.entries[index].slots.append(slot)
        return _Cut.apply(output.detach(), slot, self.anchor)  # type: ignore[return-value]

    # ---- Backward ----

    def backward(self, output_grads: Sequence[Tensor | None]) -> Segments:
        """Walk back from the gradients of the outputs; returns those of the inputs that need one, in order."""
        if not self.remaining:
            raise RuntimeError("the backward of this chunk has run already; what it needed is gone")
        self._release(max(self.remaining), output_grads)
        in_flight: deque[tuple[int, CommResult]] = deque()
        while self.remaining or in_flight:
            free = [i for i in self.remaining if not self.entries[i].users]
            if not free:
                index, arriving = in_flight.popleft()
                grads, expected = arriving.wait(), len(self.entries[index].input_slots)
                if len(grads) < expected:
                    raise ValueError(f"a transfer back returned {len(grads)} gradients for {expected} inputs")
                self._release(index, grads)
                continue
            index = max(free)
            entry = self.entries[index]
            if isinstance(entry.back, Comm):
                self.remaining.remove(index)
                entry.back.fn = partial(entry.back.fn, *(slot.close(dense=True) for slot in entry.slots))
                in_flight.append((index, (yield entry.back)))
                continue
            pairs = [(root, slot.close()) for root, slot in zip(entry.roots, entry.slots, strict=True)]
            pairs = [(root, grad) for root, grad in pairs if grad is not None]
            if entry.back is not None and pairs:
                entry.back.fn = partial(_run, pairs)
                yield entry.back
            self._release(index)
        return tuple(slot.close() for slot in self.entries[0].slots)

    def _release(self, index: int, input_grads: Sequence[Tensor | None] = ()) -> None:
        """The entry has handed back all its gradients: let go of it."""
        entry, self.entries[index] = self.entries[index], _TapeEntry()
        for slot, grad in zip(entry.input_slots, input_grads, strict=False):
            if slot is not None:
                slot.add(grad)
        for used in entry.used:
            self.entries[used].users -= 1
        self.remaining.discard(index)


def _run(pairs: list[tuple[GradientEdge, Tensor]]) -> None:
    roots, grads = zip(*pairs, strict=True)
    pairs.clear()
    torch.autograd.backward(roots, grads)


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _slot_of(value: Any) -> Slot | None:
    """The slot behind a segment's input; None if it needs no gradient."""
    if not _needs_grad(value):
        return None
    if not isinstance(slot := getattr(value.grad_fn, "slot", None), Slot):
        raise TypeError(
            "a segment got a tensor that needs a gradient but is no output of a segment: between two yields tensors "
            "may be passed on, not computed with"
        )
    return slot
