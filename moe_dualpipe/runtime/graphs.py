"""One micro-batch as a CUDA graph: the host launches it once, instead of each of its kernels.

A small model on a GPU waits for the host, which needs longer to launch a kernel than the GPU to run it. A CUDA graph
records the launches of a forward, its loss and its backward, and replays them on the same memory. So tokens, labels
and gradients are static: tokens and labels are copied into the graph's, and gradients are added to buffers that stay
when an optimizer drops them. What Python does happens only in the capture, so a model must keep its state in tensors
that it changes in place. Torch registers the device's random generator with each graph.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ..kernels.weight_grads import WeightGrads
from .stage import Criterion, as_tuple
from .warm_up import unchanged


def capture(run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Capture `run` as a CUDA graph. Returns its replay, and the tensor that holds the result of each replay.

    `run` is first executed once, to load its kernels: on another stream, because autograd adds gradients on the stream
    where it first used a parameter, and the default stream cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads, which may be saving a checkpoint, may use the device during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = run()
    return graph.replay, result


class MicroBatchGraph:
    """Forward, loss and backward of a micro-batch through all stages of a model, which are on this rank.

    modules: the stages in their order. criterion: `criterion(*outputs, *labels)` returns the loss. inputs, labels: the
    arguments of a micro-batch, for their shapes, dtypes and device. The capture changes no gradient and no buffer.
    Parameters must not be frozen or replaced afterwards.
    """

    def __init__(
        self, modules: Sequence[nn.Module], weight_grads: WeightGrads, criterion: Criterion,
        inputs: Sequence[Tensor], labels: Sequence[Tensor],
    ) -> None:  # fmt: skip
        self.modules, self.weight_grads, self.criterion = modules, weight_grads, criterion
        self.inputs, self.labels = (tuple(tensor.clone() for tensor in tensors) for tensors in (inputs, labels))
        trained = dict.fromkeys(p for module in modules for p in module.parameters() if p.requires_grad)
        self.grads = {p: torch.zeros_like(p, dtype=p.grad_dtype) for p in trained}
        with ExitStack() as stack:
            for module in modules:
                stack.enter_context(unchanged(module))
            self._use_buffers()
            self.replay, self.loss = capture(self._run)

    def __call__(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """Add the gradients of a micro-batch to those of the parameters, and return its loss."""
        for static, given in zip((*self.inputs, *self.labels), (*inputs, *labels), strict=True):
            static.copy_(given)
        self._use_buffers()
        self.replay()
        return self.loss.clone()

    def _use_buffers(self) -> None:
        """Let `grad` of each parameter be the graph's buffer, with the value of its present gradient; None is zero."""
        for parameter, grad in self.grads.items():
            if parameter.grad is None:
                grad.zero_()
            elif parameter.grad is not grad:
                grad.copy_(parameter.grad)
            parameter.grad = grad

    def _run(self) -> Tensor:
        outputs = self.inputs
        with self.weight_grads.never_defer():
            for module in self.modules:
                outputs = as_tuple(module(*outputs))
            loss = self.criterion(*outputs, *self.labels)
            loss.backward()
        return loss.detach()
