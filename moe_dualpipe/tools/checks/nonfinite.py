"""Find where a non-finite loss or gradient comes from, by running the batch again with checks in every segment.

A normal step checks only its loss and gradient norm, which costs nothing. They show that something is wrong, but not
where. So a run that is about to end checks its weights, and then runs the batch again with a probe in every segment
(probe.py). Ranks, micro-batches and stages run at the same time; "first" means first in the order of the model.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial

from torch import Tensor, nn

from ...expert_parallel.gather import gather_objects
from ...runtime.stage_sums import sum_gradients
from ...training.step import Trainer
from .probe import Observed, probe

_WEIGHTS, _FORWARD, _LOSS, _BACKWARD, _WEIGHT_GRADIENTS, _SUMS = range(6)


def first_nonfinite(trainer: Trainer, runs: Iterable[list[Tensor]], backward: bool) -> str:
    """Describe the first non-finite value: "the first non-finite output is that of layer 2, segment mlp (stage 1 ...".

    runs: an iterator that runs one batch per element, and yields this rank's losses. backward: whether it also runs
    the backward pass. This changes gradients and expert loads, so training cannot continue afterwards. Collective.
    """
    trainer.pipeline.whole = None  # it runs no segments
    search = _Search(trainer)
    search.check_stages((_WEIGHTS, 1), _weights, "{} is not finite")
    if found := search.result():
        return found
    with ExitStack() as probes:
        for index, stage in trainer.stages.items():
            probes.enter_context(probe(stage, partial(search.observe, index)))
        for losses in runs:
            for loss in losses:
                search.check(
                    loss, trainer.schedule.num_stages - 1, (_LOSS,), "all outputs are finite, but not the loss"
                )
            search.check_stages(
                (_WEIGHT_GRADIENTS, -1), _gradients, "the first non-finite gradient is that of parameter {}"
            )
            if found := search.result():
                return found
    if backward:
        for replicas in trainer.replicas:
            sum_gradients(replicas)
        search.check_stages(
            (_SUMS, -1), _gradients, "all gradients are finite, but not the sum over ranks of that of {}"
        )
    return search.result() or "when the same batch was run again, all outputs and gradients were finite"


def _weights(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from ((f"parameter {name}", parameter) for name, parameter in stage.named_parameters())
    for name, buffer in stage.named_buffers():  # -inf is valid in a mask before a softmax
        yield f"buffer {name}", buffer.float().clamp(min=-1) if buffer.is_floating_point() else buffer


def _gradients(stage: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return ((name, parameter.grad) for name, parameter in stage.named_parameters() if parameter.grad is not None)


class _Search:
    """The first non-finite value on this rank. Its key orders values: the smallest key of all ranks comes first."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer
        self.first: tuple[tuple[int, ...], str] | None = None

    def result(self) -> str:
        """The first non-finite value on all ranks, or "". Collective."""
        found = [first for first in gather_objects(self.first) if first]
        return min(found)[1] if found else ""

    def check(self, tensor: Tensor, stage: int, key: tuple[int, ...], text: str) -> None:
        floats = tensor.float() if tensor.itemsize == 1 else tensor  # torch.isfinite does not take all float8 types
        if (self.first is None or key < self.first[0]) and not floats.isfinite().all():
            self.first = key, f"{text} (stage {stage}, rank {self.trainer.layout.rank})"

    def check_stages(
        self, phase: tuple[int, int], tensors: Callable[[nn.Module], Iterator[tuple[str, Tensor]]], text: str
    ) -> None:
        """Check tensors of all stages. phase: when they are computed, and in which order: 1, or -1 for reversed."""
        when, order = phase
        for index, stage in self.trainer.stages.items():
            for i, (name, tensor) in enumerate(tensors(stage)):
                self.check(tensor, index, (when, order * index, order * i), text.format(name))

    def observe(self, stage: int, at: Observed, tensor: Tensor) -> None:
        """Check a tensor of a segment. An input comes before an output, and gradients come in reverse order."""
        order = stage, at.module, at.segment, at.is_output
        key = (_BACKWARD, *(-i for i in order)) if at.is_gradient else (_FORWARD, *order)
        self.check(tensor, stage, key, f"the first non-finite {at}")
