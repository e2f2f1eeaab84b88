"""The tape: records a chunk's forward so that its backward can run segment by segment, interleaved with another chunk.

Each Compute has its own autograd graph. Its outputs are detached from that graph before later segments use them. For
each output, a slot collects the gradient. The backward of a segment may run when it has run for all segments that use
its outputs; the last such segment runs first. A Compute runs `torch.autograd.backward` with the gradients in its slots;
a Comm starts the dual of its transfer. The tape keeps only graphs and slots, so autograd decides how long an activation
lives.

While a gradient is being transferred, a Compute that does not depend on it runs first, such as the shared experts.
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge
from torch.utils.checkpoint import checkpoint

from .segment import Comm, CommResult, Compute, Segments, Tensors, wait_for_inputs


class Slot:
    """Collects the gradient of one tensor between segments; `entry` is the index of the segment that produced it."""

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
        """Return the complete gradient and accept no more. dense: return zeros if there is none."""
        grad, self.grad, self.closed = self.grad, None, True
        return torch.zeros(self.like[0], dtype=self.like[1], device=self.like[2]) if dense and grad is None else grad


class _Detach(torch.autograd.Function):
    """Returns `data`, detached; backward adds the gradient to a slot."""

    apply = torch._C._FunctionBase.__dict__["apply"]  # Function.apply prepares for torch.func: 4 us for each segment

    @staticmethod
    def forward(ctx: Any, data: Tensor, slot: Slot, _anchor: Tensor) -> Tensor:
        ctx.slot = slot
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        ctx.slot.add(grads[0])
        return None, None, None


class _TapeEntry:
    """One segment on the tape. It does not refer to the segment's inputs or function, because they hold activations.

    back: the segment to run in backward. roots: the outputs in the Compute's graph. input_slots, slots: for its inputs
    and outputs. used: the entries whose outputs it uses. users: the number of entries that use its outputs and whose
    backward has not yet run.
    """

    __slots__ = ("back", "input_slots", "roots", "slots", "used", "users")

    def __init__(self, segment: Compute | Comm | None = None, inputs: Sequence[Any] = ()):
        self.back = segment.with_fn(segment.collective.dual if isinstance(segment, Comm) else _run) if segment else None
        self.input_slots = [_slot_of(t) for t in inputs]
        self.used = {slot.entry for slot in self.input_slots if slot is not None}
        self.users = 0
        self.slots: list[Slot] = []
        self.roots: list[GradientEdge] = []


class Tape:
    """The tape of one chunk. `forward` records it if gradients are enabled; `backward` may run once.

    Both yield segments without inputs, to be run in this order.
    """

    def __init__(self, inputs: Sequence[Any]):
        self.inputs = tuple(inputs)
        self.recording = torch.is_grad_enabled()
        self.entries = {0: _TapeEntry()}  # the first has the slots of the chunk's inputs
        self.ready: list[int] = []  # in backward: entries without users, in order
        self.in_flight: dict[object, CommResult] = {}
        self.anchor = torch.empty(0, requires_grad=True)  # so that outputs of _Detach and _ChunkNode require gradients
        self.output_slots: list[Slot | None] = []

    # ---- Forward ----

    def forward(self, segments: Callable[..., Segments]) -> Segments:
        """Run the chunk's generator. Returns its outputs as a tuple, and whether it returned a single tensor."""
        chunk = segments(*(self._detach(0, i) if self.recording and needs_grad(i) else i for i in self.inputs))
        reply = None
        while True:
            try:
                segment = chunk.send(reply)
            except StopIteration as stop:
                single = not isinstance(stop.value, tuple | list)
                outputs = wait_for_inputs((stop.value,) if single else tuple(stop.value))
                if any(isinstance(output, tuple | list | dict) for output in outputs):
                    kind = type(stop.value).__name__
                    raise TypeError(f"segments() must return a tensor or a flat tuple: got {kind}") from None
                outputs = tuple(self._tracked(output, "output") for output in outputs)
                for unused in list(self.in_flight.values()):
                    unused.wait()
                end = self._append(_TapeEntry(None, outputs)) if self.recording else 0
                self.output_slots = self.entries[end].input_slots
                return outputs, single
            match segment:
                case Compute():
                    reply = yield segment.with_fn(partial(self._compute, segment))
                case Comm():
                    reply = yield from self._comm(segment)
                case _:
                    reply = yield segment

    def _compute(self, segment: Compute) -> Any:
        inputs = wait_for_inputs(segment.inputs)
        if not self.recording:
            return segment.fn(*inputs)
        index = self._append(_TapeEntry(segment, inputs))
        fn = partial(checkpoint, segment.fn, use_reentrant=False) if segment.recompute else segment.fn
        outputs = fn(*inputs)
        results = []
        for output in (outputs,) if isinstance(outputs, Tensor) else outputs:
            if output.requires_grad:
                self.entries[index].roots.append(get_gradient_edge(output))
                output = self._detach(index, output)
            results.append(output)
        return results[0] if isinstance(outputs, Tensor) else tuple(results)

    def _comm(self, segment: Comm) -> Segments:
        inputs = tuple(self._tracked(t, segment.name, segment.layer) for t in wait_for_inputs(segment.inputs))
        # Skip the transfer back if no input needs a gradient, unless other ranks take part in it.
        back = self.recording and (segment.collective.joint or any(map(needs_grad, inputs)))
        index = self._append(_TapeEntry(segment, inputs)) if back else 0
        transfer: CommResult = yield segment.with_fn(partial(segment.fn, *(t.detach() for t in inputs)))
        del segment, inputs
        key = object()
        self.in_flight[key] = result = CommResult(lambda: self._received(index, transfer.wait(), key))
        return result

    def _tracked(self, value: Any, name: str, layer: int | None = None) -> Any:
        """A leaf of autograd, such as a parameter, as the output of a segment of its own; other values as they are."""
        if not (self.recording and _is_leaf(value)):
            return value
        leaf = Compute(name, _run)
        leaf.layer = layer
        index = self._append(_TapeEntry(leaf))
        self.entries[index].roots.append(get_gradient_edge(value))
        return self._detach(index, value)

    def _received(self, index: int, tensors: tuple[Tensor | None, ...], key: object) -> Tensors:
        """The outputs of a Comm; they need gradients if one of its inputs does."""
        del self.in_flight[key]
        sent = [t for t in tensors if t is not None]
        return tuple(self._detach(index, t) if index and (t.is_floating_point() or t.is_complex()) else t for t in sent)

    def _append(self, entry: _TapeEntry) -> int:
        for used in entry.used:
            self.entries[used].users += 1
        self.entries[index := len(self.entries)] = entry
        return index

    def _detach(self, index: int, output: Tensor) -> Tensor:
        slot = Slot(index, output)
        self.entries[index].slots.append(slot)
        return _Detach.apply(output.detach(), slot, self.anchor)

    # ---- Backward ----

    def backward(self, output_grads: Sequence[Tensor | None]) -> Segments:
        """Run backward from the gradients of the outputs. Returns the gradients of the inputs that need one."""
        if not self.entries:
            raise RuntimeError("the backward of this chunk has already run, and its saved tensors have been freed")
        *entries, end = self.entries
        self.ready = [i for i in entries[1:] if not self.entries[i].users]
        self._release(end, output_grads)
        in_flight: deque[tuple[int, CommResult]] = deque()
        while self.ready or in_flight:
            if not self.ready:
                index, result = in_flight.popleft()
                grads, expected = result.wait(), len(self.entries[index].input_slots)
                if len(grads) < expected:
                    raise ValueError(f"the backward of a Comm returned {len(grads)} gradients for {expected} inputs")
                self._release(index, grads)
                continue
            index = self.ready.pop()
            entry = self.entries[index]
            if isinstance(entry.back, Comm):
                entry.back.fn = partial(entry.back.fn, *(slot.close(dense=True) for slot in entry.slots))
                in_flight.append((index, (yield entry.back)))
                continue
            pairs = [(root, slot.close()) for root, slot in zip(entry.roots, entry.slots, strict=True)]
            pairs = [(root, grad) for root, grad in pairs if grad is not None]
            if entry.back is not None and pairs:
                entry.back.fn = partial(_run, pairs)
                yield entry.back
            self._release(index)
        return tuple(slot.close() for slot in self.entries.pop(0).slots)

    def _release(self, index: int, input_grads: Sequence[Tensor | None] = ()) -> None:
        """Add the gradients of the entry's inputs to their slots, and drop the entry."""
        entry = self.entries.pop(index)
        for slot, grad in zip(entry.input_slots, input_grads, strict=False):
            if slot is not None:
                slot.add(grad)
        for used in entry.used:
            self.entries[used].users -= 1
            if used and not self.entries[used].users:
                insort(self.ready, used)


def _run(pairs: list[tuple[GradientEdge, Tensor]]) -> None:
    roots, grads = zip(*pairs, strict=True)
    pairs.clear()
    # torch.autograd.backward first checks in Python what the engine checks as well: 1% of a step of `tiny`.
    _engine_run_backward(roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _is_leaf(value: Any) -> bool:
    return needs_grad(value) and value.grad_fn is None


def _slot_of(value: Any) -> Slot | None:
    """The slot of a segment's input; None if it needs no gradient, or is a leaf, to which autograd adds it."""
    if (node := getattr(value, "grad_fn", None)) is None:
        return None
    if not isinstance(slot := getattr(node, "slot", None), Slot):
        raise TypeError(
            "an input of a segment needs a gradient but is not the output of a segment: between two yields, pass "
            "tensors on, but do not compute with them"
        )
    return slot
