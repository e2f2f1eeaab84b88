"""The tape: what a forward leaves so that its backward can be walked segment by segment, with another chunk between.

Each Compute builds an autograd graph of its own. What it hands to later segments is cut off from that graph by a slot,
an autograd node without data that collects the gradient. Backward takes the segments that nothing waits for, last one
first: a Compute is `torch.autograd.backward` from the gradients in its slots, a Comm is the transfer the other way.
Nothing is kept but the graphs and the slots: activations live as long as autograd wants them.

While a gradient travels, a Compute that does not depend on it runs first (the shared expert, behind the combine).
"""

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from .segment import Arriving, Comm, Compute, Prepare, Segments, Tensors, resolve


class Slot:
    """The gradient of one tensor that passed between segments; `entry` is the index of its producer."""

    __slots__ = ("closed", "entry", "grad", "like")

    def __init__(self, entry: int, like: Tensor):
        self.entry, self.closed = entry, False
        self.grad: Tensor | None = None
        self.like = like.shape, like.dtype, like.device

    def add(self, grad: Tensor) -> None:
        if self.closed:
            raise RuntimeError(
                "a segment used a tensor that is not among its inputs: pass every tensor that needs a gradient as an "
                "input of the Compute or Comm that uses it"
            )
        self.grad = grad if self.grad is None else self.grad + grad

    def close(self) -> Tensor | None:
        grad, self.grad, self.closed = self.grad, None, True
        return grad

    def close_dense(self) -> Tensor:
        shape, dtype, device = self.like
        grad = self.close()
        return torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad


class _Cut(torch.autograd.Function):
    """Data without its past, and a node that puts the gradient into a slot."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, anchor: Tensor, slot: Slot) -> Tensor:
        ctx.slot = slot
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.slot.add(grads[0])
        return None, None, None


class _Entry:
    """One segment: the roots of its graph (Compute), or `back`, the transfer the other way, and the slots of its inputs
    (Comm); and the slots of its outputs.

    `users` counts the segments that use its outputs and have not handed back their gradients; `used` are the entries
    that this one uses. Inputs and functions are not kept: they would keep activations.
    """

    __slots__ = ("back", "input_slots", "layer", "name", "roots", "slots", "used", "users")

    def __init__(self, segment: Compute | Comm | None, used: set[int]):
        self.used, self.users = used, 0
        self.name, self.layer = (segment.name, segment.layer) if segment else ("input", None)
        self.back: Comm | None = None
        self.input_slots: list[Slot | None] = []
        self.roots: list[GradientEdge] = []
        self.slots: list[Slot] = []


class Tape:
    """Records one chunk's forward; `backward` may be walked once."""

    def __init__(self, inputs: Sequence[Any]):
        self.entries: list[_Entry] = [_Entry(None, set())]
        self.waiting: set[int] = set()  # the entries whose backward has not been started
        self.anchor = torch.empty(0, requires_grad=True)
        self.inputs = tuple(self._hand_out(0, i) if isinstance(i, Tensor) and i.requires_grad else i for i in inputs)

    # ---- Forward ----

    def compute(self, segment: Compute) -> Any:
        inputs = resolve(segment.inputs)
        index = self._enter(_Entry(segment, self._used(inputs)))
        fn = partial(checkpoint, segment.fn, use_reentrant=False) if segment.recompute else segment.fn
        outputs = fn(*inputs)
        handed = []
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            if output.requires_grad:
                self.entries[index].roots.append(get_gradient_edge(output))
                output = self._hand_out(index, output)
            handed.append(output)
        return handed[0] if isinstance(outputs, Tensor) else tuple(handed)

    def comm(self, segment: Comm) -> tuple[int, Tensors]:
        """Returns the entry, for `arrived`, and the inputs as plain data."""
        inputs = resolve(segment.inputs)
        entry = _Entry(segment, self._used(inputs))
        entry.input_slots = [slot_of(t) for t in inputs]
        back = segment.start_backward
        entry.back = Comm(segment.name, back, back, layer=segment.layer, weights_first=segment.weights_first)
        return self._enter(entry), tuple(t.detach() for t in inputs)

    def arrived(self, index: int, tensors: tuple[Tensor | None, ...]) -> Tensors:
        """Tensors that came for a Comm: they need gradients if an input of it does."""
        needed = any(slot is not None for slot in self.entries[index].input_slots)
        return tuple(
            self._hand_out(index, t) if needed and t.is_floating_point() else t for t in tensors if t is not None
        )

    def returned(self, outputs: Sequence[Any]) -> tuple[Slot | None, ...]:
        """The slots of the chunk's outputs; called once, at the end."""
        for used in self._used(outputs):
            self.entries[used].users += 1
        return tuple(slot_of(o) if isinstance(o, Tensor) else None for o in outputs)

    def _enter(self, entry: _Entry) -> int:
        for used in entry.used:
            self.entries[used].users += 1
        self.entries.append(entry)
        self.waiting.add(len(self.entries) - 1)
        return len(self.entries) - 1

    def _hand_out(self, index: int, output: Tensor) -> Tensor:
        slot = Slot(index, output)
        self.entries[index].slots.append(slot)
        return _Cut.apply(output.detach(), self.anchor, slot)  # type: ignore[return-value]

    def _used(self, inputs: Sequence[Any]) -> set[int]:
        """The entries whose outputs these are."""
        used = set()
        for t in inputs:
            if isinstance(t, Tensor) and t.requires_grad:
                if (slot := slot_of(t)) is None:
                    raise TypeError(
                        "a segment got a tensor that needs a gradient but is no output of a segment: between two "
                        "yields tensors may be passed on, not computed with"
                    )
                used.add(slot.entry)
        return used

    # ---- Backward ----

    def backward(self, output_slots: Sequence[Slot | None], grads: Sequence[Tensor | None]) -> Segments:
        """Walk the tape backwards, as segments; returns the gradients of the inputs that need one, in order."""
        if not self.waiting:
            raise RuntimeError("the backward of this chunk has run already; what it needed is gone")
        for slot, grad in zip(output_slots, grads, strict=True):
            if slot is not None and grad is not None:
                slot.add(grad)
        for used in {slot.entry for slot in output_slots if slot is not None}:
            self.entries[used].users -= 1
        travelling: deque[tuple[int, Arriving]] = deque()
        while self.waiting or travelling:
            index = max((i for i in self.waiting if not self.entries[i].users), default=None)
            if index is None:
                index, arriving = travelling.popleft()
                for slot, grad in zip(self.entries[index].input_slots, arriving.wait(), strict=False):
                    if slot is not None and grad is not None:
                        slot.add(grad)
                self._leave(index)
                continue
            self.waiting.remove(index)
            entry = self.entries[index]
            if entry.back is not None:
                entry.back.start = partial(entry.back.start, *(slot.close_dense() for slot in entry.slots))
                travelling.append((index, (yield entry.back)))
                continue
            pairs = [(root, slot.close()) for root, slot in zip(entry.roots, entry.slots, strict=True)]
            pairs = [(root, grad) for root, grad in pairs if grad is not None]
            if pairs:
                yield Compute(entry.name, partial(_run, pairs), layer=entry.layer)
            self._leave(index)
        return tuple(slot.close() for slot in self.entries[0].slots)

    def _leave(self, index: int) -> None:
        """The entry has handed back all its gradients: let go of it."""
        for used in self.entries[index].used:
            self.entries[used].users -= 1
        self.entries[index] = _Entry(None, set())


def _run(pairs: list[tuple[GradientEdge, Tensor]]) -> None:
    roots, grads = zip(*pairs, strict=True)
    pairs.clear()
    torch.autograd.backward(roots, grads)


def slot_of(tensor: Tensor) -> Slot | None:
    return getattr(tensor.grad_fn, "slot", None)


def play(segments: Segments, tape: Tape | None) -> Segments:
    """Drive a chunk's generator, recording on `tape`, and yield what is to be run: segments without inputs.

    Returns a tuple of the chunk's outputs, and whether it was a single tensor.
    """
    answer = None
    while True:
        try:
            segment = segments.send(answer)
        except StopIteration as stop:
            outputs = stop.value if isinstance(stop.value, tuple) else (stop.value,)
            return resolve(outputs), not isinstance(stop.value, tuple)
        match segment:
            case Prepare():
                answer = yield segment
            case Compute():
                run = partial(tape.compute if tape else _compute, segment)
                answer = yield Compute(segment.name, run, layer=segment.layer)
            case Comm():
                answer = yield from _comm(segment, tape)


def _compute(segment: Compute) -> Any:
    return segment.fn(*resolve(segment.inputs))


def _comm(segment: Comm, tape: Tape | None) -> Segments:
    index, inputs = tape.comm(segment) if tape else (0, resolve(segment.inputs))
    bare = Comm(
        segment.name, partial(segment.start, *inputs), segment.start_backward,
        layer=segment.layer, weights_first=segment.weights_first,
    )  # fmt: skip
    del inputs
    arriving: Arriving = yield bare
    if tape is None:
        return Arriving(lambda: tuple(t for t in arriving.wait() if t is not None))
    return Arriving(lambda: tape.arrived(index, arriving.wait()))
