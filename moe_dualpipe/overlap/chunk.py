"""Modules written as segments: a plain forward and backward for any framework, and the overlapped pair.

`forward` records a tape and returns tensors whose autograd node walks it, so `loss.backward()` works as ever. The
overlapped path finds that node below the loss or the outputs and walks the same tape itself, beside another chunk's
forward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .engine import Engine, Lane, engine_for
from .segment import Segments
from .tape import Slot, Tape, play
from .weight_grads import WeightGrads, bind

Outputs = Tensor | tuple[Any, ...]


class Segmented(nn.Module):
    """A module whose forward is the generator `segments(*inputs)` (see segment.py), which returns its outputs.

    As with reentrant checkpointing, gradients are accumulated by `backward()`; `torch.autograd.grad` reaches the inputs
    but not the parameters. Forward hooks do not run in an overlapped pair.
    """

    weight_grads: WeightGrads | None = None

    def segments(self, *inputs: Any) -> Segments:
        raise NotImplementedError(f"{type(self).__name__} must define segments()")

    def forward(self, *inputs: Any) -> Any:
        _bind_once(self)
        return _engine(inputs).run(_Chunk(inputs).forward(self), "F")

    @classmethod
    def overlapped_forward_backward(
        cls,
        module0: "Segmented",
        inputs0: Sequence[Any],
        criterion0: Callable[..., Tensor] | None,
        labels0: Sequence[Any] | None,
        module1: "Segmented",
        loss1: Tensor | None,
        outputs1: Sequence[Tensor] | None,
        output_grads1: Sequence[Tensor | None] | None,
        *,
        on_input_grads: Callable[[], None] | None = None,
        engine: Engine | None = None,
    ) -> tuple[Outputs, Tensor | None]:
        """Forward of one chunk and backward of another, each hiding the other's communication.

        The signature is DeepSeek's: returns (outputs0, loss0), the loss if `criterion0` is given; the backward starts
        from `loss1`, or from `outputs1` with `output_grads1`, and accumulates into parameters and inputs as
        `backward()` does. `on_input_grads` is called when the gradients of the inputs are complete, before the last
        weight gradients: the time to send them on. Raises TypeError when the second chunk was not made by `module1`.
        """
        chunk1 = _chunk_of([loss1] if loss1 is not None else outputs1 or (), module1)
        _bind_once(module0)
        _bind_once(module1)
        engine = engine or _engine(inputs0)
        chunk1.intercept(loss1, outputs1, output_grads1)
        forward = Lane(engine, _Chunk(inputs0).forward(module0), "F")
        engine.interleave(forward, Lane(engine, chunk1.backward(on_input_grads), "B", module1.weight_grads))
        outputs0 = forward.result
        if criterion0 is None:
            return outputs0, None
        return outputs0, criterion0(*(outputs0 if isinstance(outputs0, tuple) else (outputs0,)), *(labels0 or ()))

    @classmethod
    def interleaved_forward(
        cls, module0: "Segmented", inputs0: Sequence[Any], module1: "Segmented", inputs1: Sequence[Any]
    ) -> tuple[Outputs, Outputs]:
        """Forward of two chunks, each hiding the other's communication, as for inference; returns both outputs."""
        engine = _engine(inputs0)
        chunks = (module0, inputs0), (module1, inputs1)
        lane0, lane1 = (Lane(engine, _Chunk(inputs).forward(module), "F") for module, inputs in chunks)
        engine.interleave(lane1, lane0)
        return lane0.result, lane1.result


class _Chunk:
    """One chunk: its inputs, the tape between its forward and its backward, and the outputs in autograd's graph."""

    def __init__(self, inputs: Sequence[Any]):
        self.inputs = tuple(inputs)
        self.tape = Tape(self.inputs) if torch.is_grad_enabled() else None
        self.output_slots: tuple[Slot | None, ...] = ()
        self.intercepting = False
        self.output_grads: tuple[Tensor | None, ...] | None = None

    def forward(self, module: Segmented) -> Segments:
        tape = self.tape
        outputs, single = yield from play(module.segments(*(tape.inputs if tape else self.inputs)), tape)
        if tape is not None:
            tape.inputs = ()
            self.output_slots = tape.returned(outputs)
            if any(self.output_slots):
                detached = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
                outputs = _Drive.apply(self, detached, tape.anchor, *self.inputs)
        return outputs[0] if single else tuple(outputs)

    def backward(self, then: Callable[[], None] | None = None) -> Segments:
        """The segments of the backward, from the intercepted gradients into the inputs' `.grad`."""
        assert self.tape is not None
        assert self.output_grads is not None
        output_grads, self.output_grads = self.output_grads, None
        grads = yield from self.tape.backward(self.output_slots, output_grads)
        pairs = [(i, g) for i, g in zip(self._needy(), grads, strict=True) if g is not None]
        if pairs:
            torch.autograd.backward([i for i, _ in pairs], [g for _, g in pairs])
        if then is not None:
            then()

    def intercept(
        self, loss: Tensor | None, outputs: Sequence[Tensor] | None, grads: Sequence[Tensor | None] | None
    ) -> None:
        """Run autograd from the loss, or the outputs, down to this chunk only; keep the gradients that arrive there."""
        self.intercepting, self.output_grads = True, (None,) * len(self.output_slots)
        try:
            if loss is not None:
                torch.autograd.backward(loss)
            else:
                pairs = zip(outputs or (), grads or (), strict=True)
                roots = [(output, grad) for output, grad in pairs if output.requires_grad and grad is not None]
                torch.autograd.backward([output for output, _ in roots], [grad for _, grad in roots])
        finally:
            self.intercepting = False

    def _needy(self) -> list[Tensor]:
        return [i for i in self.inputs if isinstance(i, Tensor) and i.requires_grad]


class _Drive(torch.autograd.Function):
    """The chunk as one autograd node."""

    @staticmethod
    def forward(ctx: Any, chunk: _Chunk, outputs: list[Any], anchor: Tensor, *inputs: Any) -> tuple[Any, ...]:
        ctx.chunk = chunk
        ctx.set_materialize_grads(False)
        plain = [o for o, slot in zip(outputs, chunk.output_slots, strict=True) if slot is None]
        ctx.mark_non_differentiable(*(o for o in plain if isinstance(o, Tensor)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        chunk: _Chunk = ctx.chunk
        if chunk.intercepting:
            chunk.output_grads = grads
            return None, None, None, *(None for _ in chunk.inputs)
        assert chunk.tape is not None
        input_grads = iter(_engine(chunk.inputs).run(chunk.tape.backward(chunk.output_slots, grads), "B"))
        needy = [isinstance(i, Tensor) and i.requires_grad for i in chunk.inputs]
        return None, None, None, *(next(input_grads) if needs else None for needs in needy)


def _chunk_of(roots: Sequence[Tensor], module: nn.Module) -> _Chunk:
    """The chunk that `roots` were computed from."""
    stack: list[Any] = [root.grad_fn for root in roots]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if isinstance(chunk := getattr(node, "chunk", None), _Chunk):
            return chunk
        below = {next_node for next_node, _ in getattr(node, "next_functions", ()) if next_node is not None} - seen
        seen |= below
        stack += below
    raise TypeError(
        f"the loss or outputs for the backward were not computed by a {type(module).__name__} with gradients on: an "
        f"overlapped backward needs what {type(module).__name__}.forward records"
    )


def _bind_once(module: Segmented) -> None:
    """Layers find out during the forward who may put off their weight gradients, so the object must be there by then."""
    if module.weight_grads is None:
        bind(module, WeightGrads())


def _engine(inputs: Sequence[Any]) -> Engine:
    device = next((i.device for i in inputs if isinstance(i, Tensor)), torch.device("cpu"))
    return engine_for(device)
