"""Modules written as segments: a plain forward and backward for any framework, and the overlapped pair.

`forward` records a tape and returns tensors whose autograd node walks it, so `loss.backward()` works as ever. The
overlapped path finds that node below the loss or the outputs and walks the same tape itself, beside another chunk's
forward.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .engine import Engine, Lane, engine_for
from .segment import Segments
from .tape import Tape
from .weight_grads import WeightGrads, bind


class Segmented(nn.Module):
    """A module whose forward is the generator `segments(*inputs)` (see segment.py), which returns its outputs.

    As with reentrant checkpointing, gradients are accumulated by `backward()`; `torch.autograd.grad` reaches the inputs
    but not the parameters. Forward hooks do not run in an overlapped pair.
    """

    weight_grads: WeightGrads | None = None

    def segments(self, *inputs: Any) -> Segments:
        raise NotImplementedError(f"{type(self).__name__} must define segments()")

    def forward(self, *inputs: Any) -> Any:
        return _engine(inputs).run(_forward(self, inputs), "F")

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
        engine = engine or _engine(inputs0)
        if loss1 is not None:
            with engine.label("loss(B)", None):
                tape1, grads1 = _intercepted(module1, [loss1], [torch.ones_like(loss1)])
        else:
            tape1, grads1 = _intercepted(module1, outputs1 or (), output_grads1 or ())
        lane0 = Lane(engine, _forward(module0, inputs0), "F")
        lane1 = Lane(engine, _backward(tape1, grads1, on_input_grads), "B", module1.weight_grads)
        engine.interleave(lane0, lane1)
        if criterion0 is None:
            return lane0.result, None
        outputs0 = lane0.result if isinstance(lane0.result, tuple) else (lane0.result,)
        with engine.label("loss(F)", None):
            return lane0.result, criterion0(*outputs0, *(labels0 or ()))

    @classmethod
    def interleaved_forward(
        cls, module0: "Segmented", inputs0: Sequence[Any], module1: "Segmented", inputs1: Sequence[Any]
    ) -> tuple[Any, Any]:
        """Forward of two chunks, each hiding the other's communication, as for inference; returns both outputs."""
        engine = _engine(inputs0)
        lane0, lane1 = Lane(engine, _forward(module0, inputs0), "F"), Lane(engine, _forward(module1, inputs1), "F")
        engine.interleave(lane1, lane0)
        return lane0.result, lane1.result


class _Drive(torch.autograd.Function):
    """A chunk as one autograd node. With a list to put them into, it only hands over the gradients that reach it."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, outputs: list[Any], *_inputs: Any) -> tuple[Any, ...]:
        ctx.tape, ctx.intercepted = tape, None
        ctx.set_materialize_grads(False)
        plain = [o for o, slot in zip(outputs, tape.output_slots, strict=True) if slot is None]
        ctx.mark_non_differentiable(*(o for o in plain if isinstance(o, Tensor)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        inputs = ctx.tape.inputs
        if ctx.intercepted is not None:
            ctx.intercepted.append(grads)
            return (None,) * (3 + len(inputs))
        input_grads = iter(_engine(inputs).run(ctx.tape.backward(grads), "B"))
        needs = ctx.needs_input_grad[3:]
        return None, None, None, *(next(input_grads) if needed else None for needed in needs)


def _forward(module: Segmented, inputs: Sequence[Any]) -> Segments:
    """The segments of a forward; returns the module's outputs, in autograd's graph."""
    if module.weight_grads is None:  # layers find out during the forward who may put off their weight gradients
        bind(module, WeightGrads())
    tape = Tape(inputs)
    outputs, single = yield from tape.forward(module.segments)
    if any(tape.output_slots):
        detached = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
        outputs = _Drive.apply(tape, detached, tape.anchor, *tape.inputs)
    return outputs[0] if single else tuple(outputs)


def _backward(tape: Tape, output_grads: Sequence[Tensor | None], then: Callable[[], None] | None) -> Segments:
    """The segments of a backward, into the inputs' `.grad`."""
    grads = yield from tape.backward(output_grads)
    needy = [i for i in tape.inputs if isinstance(i, Tensor) and i.requires_grad]
    pairs = [(i, grad) for i, grad in zip(needy, grads, strict=True) if grad is not None]
    if pairs:
        torch.autograd.backward([i for i, _ in pairs], [grad for _, grad in pairs])
    if then is not None:
        then()


def _intercepted(
    module: nn.Module, outputs: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> tuple[Tape, Sequence[Tensor | None]]:
    """The tape that the loss or outputs came from, and the gradients that reach it: autograd runs down to it only."""
    pairs = [(o, grad) for o, grad in zip(outputs, grads, strict=True) if o.requires_grad and grad is not None]
    nodes: list[Any] = [o.grad_fn for o, _ in pairs]
    seen = set(nodes)
    while nodes and not isinstance(getattr(nodes[-1], "tape", None), Tape):
        below = {node for node, _ in getattr(nodes.pop(), "next_functions", ()) if node is not None} - seen
        seen |= below
        nodes += below
    if not nodes:
        name = type(module).__name__
        raise TypeError(f"the chunk to go backward is not what {name}.forward made with gradients enabled")
    drive = nodes[-1]
    drive.intercepted = []
    torch.autograd.backward([o for o, _ in pairs], [grad for _, grad in pairs])
    reached, drive.intercepted = drive.intercepted, None
    return drive.tape, reached[0] if reached else [None] * len(drive.tape.output_slots)


def _engine(inputs: Sequence[Any]) -> Engine:
    device = next((i.device for i in inputs if isinstance(i, Tensor)), torch.device("cpu"))
    return engine_for(device)
