"""Find where a non-finite loss or gradient comes from, by running the batch again with checks in every segment.

A normal step checks only its loss and gradient norm, which costs nothing. They show that something is wrong, but not
where. So a run that is about to end checks its weights, and then runs the batch again with a probe in every segment
(overlap/probe.py). Ranks, micro-batches and stages run at the same time; "first" means first in the order of the model.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...overlap.probe import Observed, probe
from ...runtime.replicas import sum_gradients
from ...training.step import Trainer

_WEIGHTS, _FORWARD, _LOSS, _BACKWARD, _WEIGHT_GRADIENTS, _SUMS = range(6)


def first_nonfinite(trainer: Trainer, runs: Iterable[list[Tensor]], backward: bool) -> str:
    """Describe the first non-finite value: "the first non-finite output is that of layer 2, segment mlp (stage 1 ...".

    runs: an iterator that runs one batch per element, and yields this rank's losses. backward: whether it also runs
    the backward pass. This changes gradients and expert loads, so training cannot continue afterwards. Collective.
    """
    trainer.pipeline.cuda_graphs = False  # a replay runs no segments
    search = _Search(trainer)
    search.check_weights()
    if found := search.result():
        return found
    with search.probes():
        for losses in runs:
            search.check_losses(losses)
            search.check_gradients(_WEIGHT_GRADIENTS, "the first non-finite gradient is that of parameter")
            if found := search.result():
                return found
    if backward:
        for replicas in trainer.replicas:
            sum_gradients(replicas)
        search.check_gradients(_SUMS, "all gradients are finite, but not the sum over ranks of that of")
        if found := search.result():
            return found
    return "when the same batch was run again, all outputs and gradients were finite"


class _Search:
    """The first non-finite value on this rank. Its key orders values: the smallest key of all ranks comes first."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.first: tuple[tuple[int, ...], str] | None = None

    def result(self) -> str:
        """The first non-finite value on all ranks, or "". Collective."""
        found: list[tuple[tuple[int, ...], str] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(found, self.first)
        return min(filter(None, found))[1] if any(found) else ""

    def check(self, tensor: Tensor, stage: int, key: tuple[int, ...], text: str) -> None:
        if (self.first is None or key < self.first[0]) and not _is_finite(tensor):
            self.first = key, f"{text} (stage {stage}, rank {self.trainer.layout.rank})"

    def check_weights(self) -> None:
        for index, stage in self.trainer.stages.items():
            for i, (name, parameter) in enumerate(stage.named_parameters()):
                self.check(parameter, index, (_WEIGHTS, index, i), f"parameter {name} is not finite")
            for i, (name, buffer) in enumerate(stage.named_buffers()):
                if buffer.is_floating_point():
                    buffer = buffer.float().clamp(min=-1)  # -inf is valid: a mask before a softmax
                self.check(buffer, index, (_WEIGHTS, index, 2**32 + i), f"buffer {name} is not finite")

    @contextmanager
    def probes(self) -> Iterator[None]:
        """In this context, check what all segments compute."""
        with ExitStack() as probes:
            for index, stage in self.trainer.stages.items():
                probes.enter_context(probe(stage, partial(self.observe, index)))
            yield

    def check_losses(self, losses: list[Tensor]) -> None:
        last = self.trainer.schedule.num_stages - 1
        for loss in losses:
            self.check(loss, last, (_LOSS, last), "all outputs are finite, but not the loss")

    def check_gradients(self, phase: int, text: str) -> None:
        for index, stage in self.trainer.stages.items():
            for i, (name, parameter) in enumerate(stage.named_parameters()):
                if parameter.grad is not None:
                    self.check(parameter.grad, index, (phase, -index, -i), f"{text} {name}")

    def observe(self, stage: int, at: Observed, tensor: Tensor) -> None:
        """Check a tensor of a segment. An input comes before an output, and gradients come in reverse order."""
        order = stage, at.module, at.segment, at.is_output
        key = (_BACKWARD, *(-i for i in order)) if at.is_gradient else (_FORWARD, *order)
        self.check(tensor, stage, key, f"the first non-finite {at}")


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_floating_point() and tensor.itemsize == 1:  # torch.isfinite does not take all float8 types
        tensor = tensor.float()
    return bool(torch.isfinite(tensor).all())
