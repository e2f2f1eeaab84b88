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
from torch.autograd.function import once_differentiable

from ..kernels.weight_grads import WeightGrads, bind
from .engine import Engine, Lane, engine_for
from .labels import BACKWARD, FORWARD, LOSS
from .segment import Compute, Segments
from .tape import Tape


class Segmented(nn.Module):
    """A module whose forward is the generator `segments(*inputs)` (see segment.py), which returns its outputs.

    As with reentrant checkpointing, gradients are accumulated by `backward()`: `torch.autograd.grad` reaches the
    inputs, adds to the parameters' `.grad` on its way, and cannot be differentiated again. A parameter that several
    segments use gets its gradient in as many parts, and so do its hooks. Forward hooks do not run in a pair.
    """

    weight_grads: WeightGrads | None = None

    def segments(self, *inputs: Any) -> Segments:
        raise NotImplementedError(f"{type(self).__name__} must define segments()")

    def forward(self, *inputs: Any) -> Any:
        return _engine_of(inputs).run(_forward(self, inputs), FORWARD)[0]

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
    ) -> tuple[Any, Tensor | None]:
        """Forward of one chunk and backward of another, each hiding the other's communication.

        The signature is DeepSeek's: returns (outputs0, loss0), the loss if `criterion0` is given; the backward starts
        from `loss1`, or from `outputs1` with `output_grads1`, and accumulates into parameters and inputs as
        `backward()` does. `on_input_grads` is called when the gradients of the inputs are complete, before the last
        weight gradients: the time to send them on. Raises TypeError when the second chunk was not made by `module1`.
        """
        engine = engine or _engine_of(inputs0)
        lane0 = Lane(engine, _forward(module0, inputs0, criterion0, labels0), FORWARD)
        backward = _backward(module1, loss1, outputs1 or (), output_grads1 or (), on_input_grads)
        engine.interleave(lane0, Lane(engine, backward, BACKWARD, module1.weight_grads))
        return lane0.result

    @classmethod
    def interleaved_forward(
        cls, module0: "Segmented", inputs0: Sequence[Any], module1: "Segmented", inputs1: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Forward of two chunks, each hiding the other's communication, as for inference; returns both outputs."""
        engine = _engine_of(inputs0)
        lane0, lane1 = (
            Lane(engine, _forward(module0, inputs0), FORWARD),
            Lane(engine, _forward(module1, inputs1), FORWARD),
        )
        engine.interleave(lane1, lane0)
        return lane0.result[0], lane1.result[0]


class _ChunkNode(torch.autograd.Function):
    """A chunk as one autograd node. With a list to put them into, it only hands over the gradients that reach it."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, module: Segmented, outputs: list[Any], *_inputs: Any) -> tuple[Any, ...]:
        ctx.tape, ctx.module, ctx.intercepted = tape, module, None
        ctx.set_materialize_grads(False)
        plain = [o for o, slot in zip(outputs, tape.output_slots, strict=True) if slot is None]
        ctx.mark_non_differentiable(*(o for o in plain if isinstance(o, Tensor)))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        inputs = ctx.tape.inputs
        if ctx.intercepted is not None:
            ctx.intercepted.append(grads)
            return (None,) * (4 + len(inputs))
        input_grads = iter(_engine_of(inputs).run(ctx.tape.backward(grads), BACKWARD))
        needs = ctx.needs_input_grad[4:]
        return None, None, None, None, *(next(input_grads) if needed else None for needed in needs)


def _forward(
    module: Segmented,
    inputs: Sequence[Any],
    criterion: Callable[..., Tensor] | None = None,
    labels: Sequence[Any] | None = None,
) -> Segments:
    """The segments of a forward; returns the module's outputs, in autograd's graph, and the loss."""
    if module.weight_grads is None:  # layers find out during the forward who may put off their weight gradients
        bind(module, WeightGrads())
    tape = Tape(inputs)
    outputs, single = yield from tape.forward(module.segments)
    if any(tape.output_slots):
        detached = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
        outputs = _ChunkNode.apply(tape, module, detached, tape.anchor, *tape.inputs)
    loss = (yield Compute(LOSS, partial(criterion, *outputs, *(labels or ())))) if criterion else None
    return outputs[0] if single else tuple(outputs), loss


def _backward(
    module: Segmented,
    loss: Tensor | None,
    outputs: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    on_input_grads: Callable[[], None] | None,
) -> Segments:
    """The segments of a backward, into the inputs' `.grad`."""
    roots = [(loss, torch.ones_like(loss))] if loss is not None else zip(outputs, grads, strict=True)
    pairs = [(root, grad) for root, grad in roots if root.requires_grad and grad is not None]
    if pairs:
        down = partial(_intercept_gradients, module, pairs)
        tape, output_grads = (yield Compute(LOSS, down)) if loss is not None else down()
        input_grads = yield from tape.backward(output_grads)
        needy = [i for i in tape.inputs if isinstance(i, Tensor) and i.requires_grad]
        reached = [(i, grad) for i, grad in zip(needy, input_grads, strict=True) if grad is not None]
        if reached:
            torch.autograd.backward([i for i, _ in reached], [grad for _, grad in reached])
    if on_input_grads is not None:
        on_input_grads()


def _intercept_gradients(module: Segmented, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tape, Sequence[Tensor | None]]:
    """The tape of `module` that the roots came from, and the gradients that reach it: autograd runs down to it only."""
    nodes: list[Any] = [root.grad_fn for root, _ in pairs]
    seen, leaves, drive = set(nodes), [], None
    while nodes:
        node = nodes.pop()
        if drive is None and getattr(node, "module", None) is module:
            drive = node
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        below = [n for n, _ in getattr(node, "next_functions", ()) if n is not None and n not in seen]
        seen.update(below)
        nodes += below
    if drive is None:
        name = type(module).__name__
        raise TypeError(f"the chunk to go backward is not what this {name}'s forward made with gradients enabled")
    drive.intercepted = []
    # What is below the chunk's inputs must not run yet, nor see that nothing came.
    roots, grads = zip(*pairs, strict=True)
    torch.autograd.backward(roots, grads, inputs=[drive.tape.anchor, *leaves])
    reached, drive.intercepted = drive.intercepted, None
    return drive.tape, reached[0] if reached else [None] * len(drive.tape.output_slots)


def _engine_of(inputs: Sequence[Any]) -> Engine:
    devices = [i.device for i in inputs if isinstance(i, Tensor)]
    return engine_for(next((d for d in devices if d.type == "cuda"), torch.device("cpu")))
