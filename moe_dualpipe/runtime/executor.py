"""Run any schedule: each rank executes its own action list, over any transport and on any device.

`schedule.comms` adds the transfers to the lists. A rank posts a receive one compute action before it needs the data,
starts a send as soon as the data exists, and waits for a transfer only where the data is used. This file checks the
arguments of a step and decides which pairs are overlapped; rank_step.py runs the list.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..messages import plural
from ..overlap import WeightGrads, bind
from ..schedule import (
    Action,
    Backward,
    Forward,
    Overlap,
    Part,
    Schedule,
    Step,
    add_comms,
    members,
    receive_early,
    validate,
)
from .p2p import P2P
from .rank_step import RankStep, StepResult
from .stage import Criterion, OverlappedModule, Stage


@lru_cache(maxsize=16)
def _add_transfers(schedule: Schedule, forward_only: bool) -> tuple[Schedule, tuple[tuple[Step, ...], ...]]:
    schedule = schedule.forward_only() if forward_only else validate(schedule)
    return schedule, receive_early(schedule, add_comms(schedule))


class Executor:
    """Executes schedules on the stages of this rank.

    modules: stage index -> module. weight_grads: collects the deferred weight gradients; it is given to every layer
    inside the modules that has an attribute `weight_grads`. overlap: whether to run a pair of actions by the modules'
    `overlapped_forward_backward`, if both modules are of one class that defines it. on_action: called with each compute
    action when it begins.
    """

    def __init__(
        self, modules: Mapping[int, nn.Module], p2p: P2P, weight_grads: WeightGrads | None = None,
        overlap: bool = True, on_action: Callable[[Action], None] | None = None,
    ):  # fmt: skip
        self.modules, self.p2p, self.overlap, self.on_action = dict(modules), p2p, overlap, on_action
        self.weight_grads = weight_grads if weight_grads is not None else WeightGrads()
        self.before_stage: Callable[[int], None] | None = None
        """Called with each stage before its first action in a step: something may still write its weights."""
        for module in self.modules.values():
            bind(module, self.weight_grads)

    def step(
        self, schedule: Schedule, inputs: Mapping[int, Sequence[Tensor]],
        labels: Mapping[int, Sequence[Any]] | None = None, criterion: Criterion | None = None,
        return_outputs: bool = False, on_gradients: Callable[[int], None] | None = None,
        context: Mapping[int, Sequence[Any]] | None = None,
    ) -> StepResult:  # fmt: skip
        """Run one step; under `torch.no_grad()`, run only its forwards.

        inputs: micro-batch -> arguments of the first stage, on the rank that holds the first stage for it.
        labels: micro-batch -> further arguments of the criterion, on the rank that holds the last stage for it.
        criterion: `criterion(*outputs, *labels)` returns the loss. None: return outputs only.
        return_outputs: also return the outputs of the last stage.
        on_gradients: called with each stage when the gradients of this step are complete on this rank.
        context: micro-batch -> further arguments of each stage of this rank, which need no gradient and are not sent.

        Gradients are accumulated into the modules' parameters, summed over micro-batches. Raises ValueError if this
        rank lacks a stage, an input or a criterion that the schedule needs.
        """
        schedule, steps = _add_transfers(schedule, forward_only=not torch.is_grad_enabled())
        self._check(schedule, inputs, labels, criterion)
        pairs = self._overlapped_pairs(schedule)
        actions = schedule.actions[self.p2p.rank]
        stages = {index: self._stage(index, actions, pairs) for index in self.modules}
        step = RankStep(
            schedule, self.p2p, stages, pairs, labels or {}, context or {}, criterion, return_outputs,
            self.on_action, self.before_stage, on_gradients,
        )  # fmt: skip
        try:
            with self.p2p.step():
                return step.run(steps[self.p2p.rank], inputs)
        except BaseException:
            self.weight_grads.clear()
            raise

    def _overlapped_pairs(self, schedule: Schedule) -> frozenset[Overlap]:
        """The pairs of this rank that `overlapped_forward_backward` runs; others run as a forward, then a backward."""

        def has_method(pair: Overlap) -> bool:
            first, second = (self.modules[member.stage] for member in members(pair))
            return type(first) is type(second) and isinstance(first, OverlappedModule)

        actions = schedule.actions[self.p2p.rank] if self.overlap else ()
        return frozenset(action for action in actions if isinstance(action, Overlap) and has_method(action))

    def _stage(self, index: int, actions: Sequence[Action], pairs: frozenset[Overlap]) -> Stage:
        in_pairs = {member for pair in pairs for member in members(pair)}
        overlapped = {b.micro_batch for b in in_pairs if isinstance(b, Backward) and b.stage == index}
        alone = [
            member
            for action in actions
            for member in members(action)
            if member.stage == index and member not in in_pairs
        ]
        forwards = {member.micro_batch for member in alone if isinstance(member, Forward)}
        whole = {member.micro_batch for member in alone if isinstance(member, Backward) and member.part is Part.FULL}
        return Stage(index, self.modules[index], self.weight_grads, overlapped, forwards & whole)

    def _check(
        self, schedule: Schedule, inputs: Mapping[int, Sequence[Tensor]],
        labels: Mapping[int, Sequence[Any]] | None, criterion: Criterion | None,
    ) -> None:  # fmt: skip
        rank = self.p2p.rank
        if schedule.num_ranks != self.p2p.num_ranks:
            ranks = plural(schedule.num_ranks, "rank")
            raise ValueError(f"{schedule.name} is for {ranks}, but the pipeline has {self.p2p.num_ranks}")
        for member in (member for action in schedule.actions[rank] for member in members(action)):
            stage, micro_batch = member.stage, member.micro_batch
            if stage not in self.modules:
                held = ", ".join(map(str, self.modules)) or "none"
                raise ValueError(f"rank {rank} must run {member}, but it holds these stages: {held}")
            if isinstance(member, Forward) and stage == 0 and micro_batch not in inputs:
                raise ValueError(f"no input for micro-batch {micro_batch}, which enters at rank {rank}")
            if stage == schedule.num_stages - 1:
                if isinstance(member, Backward) and criterion is None:
                    raise ValueError(f"rank {rank} holds the last stage and needs a criterion to train")
                if criterion is not None and labels is not None and micro_batch not in labels:
                    raise ValueError(f"no labels for micro-batch {micro_batch}, which ends on rank {rank}")
