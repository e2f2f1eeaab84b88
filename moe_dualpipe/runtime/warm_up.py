"""Load all kernels before the first step.

A GPU loads a kernel at its first launch, and loading may wait for all work on the device. A receive that has already
been posted is part of that work. If the peer sends the message only after this rank has continued, the two ranks wait
for each other forever. So each stage first runs once alone, with its expert-parallel transfers, but without transfers
between stages.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..kernels.weight_grads import WeightGrads
from .stage import Criterion, Stage


def load_kernels(
    modules: Mapping[int, nn.Module], inputs: Mapping[int, Sequence[Tensor]], weight_grads: WeightGrads,
    criterion: Criterion | None = None, labels: Sequence[Tensor] = (),
) -> None:  # fmt: skip
    """Run forward and backward of each stage, whole and split, and undo every change. Collective over expert groups.

    inputs: stage -> its inputs, with the shapes and dtypes of a micro-batch. criterion: the loss of the last stage,
    with its labels. Parameters, gradients and buffers keep their values. All ranks of an expert group must hold
    the same stages.
    """
    last = max(modules)
    for index, module in sorted(modules.items()):
        with unchanged(module):
            for split in (False, True):
                stage = Stage(index, module, weight_grads, whole=() if split else (0,))
                own = tuple(t.detach().requires_grad_(t.is_floating_point() and index > 0) for t in inputs[index])
                outputs, loss = stage.forward(0, own, criterion if index == last else None, tuple(labels))
                grads = () if loss is not None else tuple(torch.zeros_like(o) for o in outputs if o.is_floating_point())
                stage.backward(0, grads, split)
                if split:
                    stage.backward_weights(0)


@contextmanager
def unchanged(module: nn.Module) -> Iterator[None]:
    """When this context ends, restore the module's gradients and buffers."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    grads = [(parameter, parameter.grad) for parameter in module.parameters()]
    for parameter, _ in grads:
        parameter.grad = None
    with torch.enable_grad():
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, grad in grads:
                    parameter.grad = grad
                for buffer, before in buffers:
                    buffer.copy_(before)
