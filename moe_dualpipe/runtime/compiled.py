"""One micro-batch as one function that torch.compile compiles: forward, loss and backward.

In a small model on a CPU, Python's work for segments and their tape takes longer than some operators. This is to a CPU
what a CUDA graph (graphs.py) is to a GPU: layers run in Python only while torch.compile traces them, so a model must
keep its state in buffers. An operator with `opaque` (kernels/fuse.py) remains a call into Python.

Segments run one after another, with the functions of autograd that they call, so results differ from those of a
schedule only by rounding.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..kernels import fuse
from ..overlap.segment import Comm, CommResult, Segments, wait_for_inputs
from .stage import Criterion, as_tuple


class CompiledMicroBatch:
    """Forward, loss and backward of a micro-batch through all stages of a model, which are on this rank.

    modules: the stages in their order. criterion: `criterion(*outputs, *labels)` returns the loss. Parameters and
    buffers must not be replaced afterwards.
    """

    def __init__(self, modules: Sequence[Any], criterion: Criterion) -> None:
        self.model = _InOrder(modules, criterion)
        self.state = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        traced = torch._dynamo.nonstrict_trace(self._run)

        def run(*inputs: Any) -> Tensor:
            return traced(*inputs)

        run.__code__ = run.__code__.replace()  # torch.compile caches by code object, so each model needs its own
        self.compiled = torch.compile(run, fullgraph=True, dynamic=False, backend=fuse.BACKEND)

    def __call__(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """Add the gradients of a micro-batch to those of the parameters, and return its loss."""
        grads = [(tensor, tensor.grad) for tensor in self.state.values() if tensor.grad is not None]
        for tensor, _ in grads:  # torch.compile would compile again for tensors with gradients
            tensor.grad = None
        try:
            loss = self.compiled(self.state, tuple(inputs), tuple(labels))
        finally:
            for tensor, grad in grads:
                tensor.grad = grad
        loss.backward()
        return loss.detach()

    def _run(self, state: dict[str, Tensor], inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        # Stages with one embedding share its module: torch would replace it twice, and restore a traced tensor.
        return functional_call(self.model, state, (inputs, labels), tie_weights=False)


class _InOrder(nn.Module):
    def __init__(self, modules: Sequence[Any], criterion: Criterion) -> None:
        super().__init__()
        self.stages = nn.ModuleList(modules)
        self.criterion = criterion

    def forward(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        outputs: Any = inputs
        for stage in self.stages:
            segments: Any = stage.segments
            outputs = wait_for_inputs(as_tuple(_in_order(segments(*outputs))))
        return self.criterion(*outputs, *labels)


def _in_order(segments: Segments) -> Any:
    """Run segments one after another, without a tape. Returns their result. Raises ValueError for other ranks' rows."""
    reply = None
    while True:
        try:
            segment = segments.send(reply)
        except StopIteration as stop:
            return stop.value
        if isinstance(segment, Comm) and segment.collective.joint:
            raise ValueError(
                "a compiled micro-batch cannot exchange rows with other ranks: autograd would not send back"
            )
        reply = segment.fn(*wait_for_inputs(segment.inputs))
        if isinstance(segment, Comm):
            received = tuple(t for t in reply.wait() if t is not None)
            reply = CommResult(lambda received=received: received)
