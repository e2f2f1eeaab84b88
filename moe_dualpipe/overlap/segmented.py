"""Modules written as segments. They run like any other module, or in an overlapped pair.

`forward` records a tape and returns tensors whose autograd node runs the tape's backward, so `loss.backward()` works as
for any module. An overlapped pair finds this node in the graph of the loss or the outputs, and runs the same backward
interleaved with another chunk's forward.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.backend import forbid_double_backward
from ..kernels.weight_grads import WeightGrads, bind
from .engine import Engine, Lane, engine_for
from .labels import BACKWARD, FORWARD, LOSS
from .segment import Compute, Segments
from .tape import Tape, needs_grad


class Segmented(nn.Module):
    """A module whose forward is the generator `segments(*inputs)` (see segment.py), which returns its outputs.

    Gradients work as with reentrant checkpointing: `torch.autograd.grad` also accumulates into the parameters' `.grad`,
    and double backward is not supported. If several segments use a parameter, its gradient is added in several parts,
    and its hooks run for each part. Forward hooks of this module do not run in a pair.
    """

    weight_grads: WeightGrads | None = None

    def segments(self, *inputs: Any) -> Segments:
        raise NotImplementedError(f"{type(self).__name__} must define segments()")

    def forward(self, *inputs: Any, **constants: Any) -> Any:
        """constants: keyword arguments of `segments` that need no gradient."""
        segments = partial(self.segments, **constants)
        return _engine_of(inputs).run(_forward(self, inputs, segments=segments), FORWARD)[0]

    @classmethod
    def overlapped_forward_backward(
        cls, module0: "Segmented", inputs0: Sequence[Any], criterion0: Callable[..., Tensor] | None,
        labels0: Sequence[Any] | None, module1: "Segmented", loss1: Tensor | None, outputs1: Sequence[Tensor] | None,
        output_grads1: Sequence[Tensor | None] | None, *,
        on_input_grads: Callable[[], None] | None = None, engine: Engine | None = None,
    ) -> tuple[Any, Tensor | None]:  # fmt: skip
        """Run the forward of one chunk and the backward of another, each hiding the other's communication.

        The positional arguments are DeepSeek's. Returns (outputs0, loss0); loss0 is None without `criterion0`. The
        backward starts from `loss1`, or from `outputs1` with `output_grads1`, and accumulates gradients of parameters
        and inputs as `backward()` does. on_input_grads: called once, when the gradients of the inputs are complete,
        before the last weight gradients. Raises TypeError if `module1` did not produce `loss1` or `outputs1`.
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
        """Run the forwards of two chunks, each hiding the other's communication. Returns both outputs."""
        engine = _engine_of(inputs0)
        lane0, lane1 = (Lane(engine, _forward(m, i), FORWARD) for m, i in ((module0, inputs0), (module1, inputs1)))
        engine.interleave(lane1, lane0)
        return lane0.result[0], lane1.result[0]


class _ChunkNode(torch.autograd.Function):
    """A chunk as one autograd node. If `intercepted` is a list, backward only appends the output gradients to it."""

    @staticmethod
    def forward(ctx: Any, tape: Tape, module: Segmented, outputs: list[Any], *_inputs: Any) -> tuple[Any, ...]:
        ctx.tape, ctx.module, ctx.intercepted = tape, module, None
        ctx.set_materialize_grads(False)
        plain = [o for o, slot in zip(outputs, tape.output_slots, strict=True) if slot is None]
        ctx.mark_non_differentiable(*(o for o in plain if isinstance(o, Tensor)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        forbid_double_backward(type(ctx.module).__name__, "its segments record no graph of their backward")
        inputs = ctx.tape.inputs
        if ctx.intercepted is not None:
            ctx.intercepted.append(grads)
            return (None,) * (4 + len(inputs))
        input_grads = iter(_engine_of(inputs).run(ctx.tape.backward(grads), BACKWARD))
        needs = ctx.needs_input_grad[4:]
        return None, None, None, None, *(next(input_grads) if needed else None for needed in needs)


def _forward(
    module: Segmented, inputs: Sequence[Any], criterion: Callable[..., Tensor] | None = None,
    labels: Sequence[Any] | None = None, segments: Callable[..., Segments] | None = None,
) -> Segments:  # fmt: skip
    """The segments of a forward. Returns the module's outputs, connected to the autograd graph, and the loss.

    segments: the module's generator; by default, its method.
    """
    if module.weight_grads is None:  # layers read this attribute in the forward
        bind(module, WeightGrads())
    tape = Tape(inputs)
    outputs, single = yield from tape.forward(segments or module.segments)
    if any(tape.output_slots):
        detached = [o.detach() if isinstance(o, Tensor) else o for o in outputs]
        outputs = _ChunkNode.apply(tape, module, detached, tape.anchor, *tape.inputs)
    loss = (yield Compute(LOSS, partial(criterion, *outputs, *(labels or ())))) if criterion else None
    return outputs[0] if single else tuple(outputs), loss


def _backward(
    module: Segmented, loss: Tensor | None, outputs: Sequence[Tensor], grads: Sequence[Tensor | None],
    on_input_grads: Callable[[], None] | None,
) -> Segments:  # fmt: skip
    """The segments of a backward. It accumulates gradients of parameters and of inputs."""
    roots = [(loss, torch.ones_like(loss))] if loss is not None else zip(outputs, grads, strict=True)
    pairs = [(root, grad) for root, grad in roots if root.requires_grad and grad is not None]
    if pairs:
        intercept = partial(_intercept_gradients, module, pairs)
        tape, output_grads = (yield Compute(LOSS, intercept)) if loss is not None else intercept()
        input_grads = yield from tape.backward(output_grads)
        inputs = [i for i in tape.inputs if needs_grad(i)]
        reached = [(i, grad) for i, grad in zip(inputs, input_grads, strict=True) if grad is not None]
        if reached:
            torch.autograd.backward([i for i, _ in reached], [grad for _, grad in reached])
    if on_input_grads is not None:
        on_input_grads()


def _intercept_gradients(module: Segmented, pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tape, Sequence[Tensor | None]]:
    """Find the chunk of `module` in the graph of the roots, and run autograd from the roots to the chunk's outputs.

    Returns the chunk's tape and the gradients of its outputs.
    """
    nodes: list[Any] = [root.grad_fn for root, _ in pairs]
    seen, leaves, chunk = set(nodes), [], None
    while nodes:
        node = nodes.pop()
        if chunk is None and getattr(node, "module", None) is module:
            chunk = node
            continue
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        below = [n for n, _ in getattr(node, "next_functions", ()) if n is not None and n not in seen]
        seen.update(below)
        nodes += below
    if chunk is None:
        name = type(module).__name__
        raise TypeError(f"backward of a chunk that the forward of this {name} did not produce with gradients enabled")
    chunk.intercepted = []
    # With `inputs`, autograd does not run what produced the chunk's inputs: their gradients do not exist yet.
    roots, grads = zip(*pairs, strict=True)
    torch.autograd.backward(roots, grads, inputs=[chunk.tape.anchor, *leaves])
    reached, chunk.intercepted = chunk.intercepted, None
    return chunk.tape, reached[0] if reached else [None] * len(chunk.tape.output_slots)


def _engine_of(inputs: Sequence[Any]) -> Engine:
    devices = [i.device for i in inputs if isinstance(i, Tensor)]
    return engine_for(next((d for d in devices if d.type == "cuda"), torch.device("cpu")))
