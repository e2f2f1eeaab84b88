"""Run any schedule: each rank walks its own list, on whichever transport and device the links use.

The list comes from `schedule.comms`, so a rank posts a receive one compute action before it needs the data, starts a
send as soon as it has the data, and waits for a transfer only where the data is used. What is left to this file is a
dispatch table and the bookkeeping of one step, which lives in an object that dies with the step.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import record_function

from ..overlap import Segmented, WeightGrads, bind
from ..schedule import (
    Action,
    Backward,
    Flow,
    Forward,
    Overlap,
    Part,
    Recv,
    Schedule,
    Send,
    Step,
    add_comms,
    counterpart,
    halves,
    receive_early,
    validate,
)
from .p2p import P2P, Receiving, Sending
from .stage import Criterion, Stage, Tensors, as_tuple

SENDS_IN_FLIGHT = 2  # a send is waited for, so that its buffer can go, when so many more compute actions have run


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the last stage produced on this rank, by micro-batch; empty on ranks that do not hold it."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensors] = field(default_factory=dict)


@lru_cache(maxsize=16)
def _lower(schedule: Schedule, forward_only: bool) -> tuple[Schedule, tuple[tuple[Step, ...], ...]]:
    schedule = schedule.forward_only() if forward_only else validate(schedule)
    return schedule, tuple(receive_early(steps) for steps in add_comms(schedule))


class Executor:
    """Executes schedules on the stages that this rank holds.

    `modules` maps a stage's index to its module. `weight_grads` collects the deferred weight gradients; it is given to
    every layer inside the modules that has an attribute `weight_grads`. `overlap`: whether an overlapped pair is handed
    to the modules' `overlapped_forward_backward`, where both are of a class that defines it. `on_action` is told of
    every compute action when it begins.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        p2p: P2P,
        weight_grads: WeightGrads | None = None,
        overlap: bool = True,
        on_action: Callable[[Action], None] | None = None,
    ):
        self.modules = dict(modules)
        self.on_action = on_action
        self.p2p = p2p
        self.overlap = overlap
        self.weight_grads = weight_grads if weight_grads is not None else WeightGrads()
        for module in self.modules.values():
            bind(module, self.weight_grads)

    def step(
        self,
        schedule: Schedule,
        inputs: Mapping[int, Sequence[Tensor]],
        labels: Mapping[int, Sequence[Tensor]] | None = None,
        criterion: Criterion | None = None,
        return_outputs: bool = False,
    ) -> StepResult:
        """Run one step; under `torch.no_grad()` only its forwards.

        inputs: by micro-batch, the first stage's arguments; needed where the first stage of that micro-batch is.
        labels: by micro-batch, further arguments of the criterion; needed where the last stage is.
        criterion: `criterion(*outputs, *labels)` gives the loss; may be None when only outputs are wanted.
        return_outputs: return the last stage's outputs as well; they are dropped otherwise.

        Gradients are accumulated into the modules' parameters, summed over micro-batches. Raises ValueError when this
        rank lacks a stage, an input or a criterion that the schedule asks of it.
        """
        schedule, steps = _lower(schedule, forward_only=not torch.is_grad_enabled())
        self._check(schedule, inputs, labels, criterion)
        pairs = self._overlapped_pairs(schedule)
        backwards = [pair.backward for pair in pairs]
        stages = {
            index: Stage(index, module, self.weight_grads, {b.micro_batch for b in backwards if b.stage == index})
            for index, module in self.modules.items()
        }
        run = _Run(schedule, self.p2p, stages, pairs, inputs, labels or {}, criterion, return_outputs, self.on_action)
        try:
            with self.p2p.step():
                return run.all(steps[self.p2p.rank])
        except BaseException:
            self.weight_grads.clear()
            raise

    def _overlapped_pairs(self, schedule: Schedule) -> frozenset[Overlap]:
        """The pairs on this rank that a module's own method runs; the others run forward, then backward."""

        def has_method(pair: Overlap) -> bool:
            kinds = {type(self.modules[half.stage]) for half in halves(pair)}
            return len(kinds) == 1 and hasattr(kinds.pop(), "overlapped_forward_backward")

        actions = schedule.actions[self.p2p.rank] if self.overlap else ()
        return frozenset(action for action in actions if isinstance(action, Overlap) and has_method(action))

    def _check(
        self,
        schedule: Schedule,
        inputs: Mapping[int, Sequence[Tensor]],
        labels: Mapping[int, Sequence[Tensor]] | None,
        criterion: Criterion | None,
    ) -> None:
        if schedule.num_ranks != self.p2p.num_ranks:
            raise ValueError(
                f"{schedule.name} is for {schedule.num_ranks} ranks, the pipeline has {self.p2p.num_ranks}"
            )
        for action in schedule.actions[self.p2p.rank]:
            for half in halves(action):
                if half.stage not in self.modules:
                    held = ", ".join(map(str, self.modules)) or "none"
                    raise ValueError(f"rank {self.p2p.rank} is to run {half} but holds stages: {held}")
                if isinstance(half, Forward) and half.stage == 0 and half.micro_batch not in inputs:
                    raise ValueError(
                        f"no input for micro-batch {half.micro_batch}, which enters at rank {self.p2p.rank}"
                    )
                if half.stage == schedule.num_stages - 1:
                    if isinstance(half, Backward) and criterion is None:
                        raise ValueError(f"rank {self.p2p.rank} holds the last stage and needs a criterion to train")
                    if criterion is not None and labels is not None and half.micro_batch not in labels:
                        raise ValueError(
                            f"no labels for micro-batch {half.micro_batch}, which ends on rank {self.p2p.rank}"
                        )


class _Run:
    """The state of one step on one rank."""

    def __init__(
        self,
        schedule: Schedule,
        p2p: P2P,
        stages: dict[int, Stage],
        overlapped: frozenset[Overlap],
        inputs: Mapping[int, Sequence[Tensor]],
        labels: Mapping[int, Sequence[Tensor]],
        criterion: Criterion | None,
        return_outputs: bool,
        on_action: Callable[[Action], None] | None = None,
    ):
        self.schedule, self.p2p, self.stages, self.overlapped = schedule, p2p, stages, overlapped
        self.labels, self.criterion, self.return_outputs = labels, criterion, return_outputs
        self.last, self.on_action = schedule.num_stages - 1, on_action
        # What a stage waits for, by (stage, micro-batch): its inputs, and the gradients of its outputs.
        self.arriving: dict[Flow, dict[tuple[int, int], Receiving]] = {Flow.ACTIVATION: {}, Flow.GRADIENT: {}}
        for micro_batch, tensors in inputs.items():
            self.arriving[Flow.ACTIVATION][0, micro_batch] = Receiving(tuple(tensors))
        self.leaving: dict[tuple[int, int, Flow], Tensors] = {}
        self.sending: deque[tuple[int, Sending]] = deque()  # with the number of compute actions before it
        self.sent_early: dict[Send, Sending] = {}
        self.result = StepResult()

    def all(self, steps: tuple[Step, ...]) -> StepResult:
        computed = 0
        for step in steps:
            try:
                match step:
                    case Recv():
                        self.recv(step)
                    case Send():
                        self.sending.append((computed, self.sent_early.pop(step, None) or self.send(step)))
                    case _:
                        while self.sending and self.sending[0][0] <= computed - SENDS_IN_FLIGHT:
                            self.sending.popleft()[1].wait()
                        if self.on_action:
                            self.on_action(step)
                        with record_function(str(step)):
                            self.compute(step)
                        computed += 1
            except Exception as error:
                rank = dist.get_rank() if dist.is_initialized() else 0
                where = f"rank {rank} (pipeline rank {self.p2p.rank})"
                error.add_note(f"while {where} ran {describe(step)} of {self.schedule.name}")
                raise
        for _, sending in self.sending:
            sending.wait()
        return self.result

    # ---- Compute ----

    def compute(self, action: Forward | Backward | Overlap) -> None:
        match action:
            case Forward(stage, micro_batch):
                self.forward(self.stages[stage], micro_batch)
            case Backward(stage, micro_batch, Part.WEIGHT):
                self.stages[stage].backward_weights(micro_batch)
            case Backward(stage, micro_batch, part):
                grads = self.receive(Flow.GRADIENT, stage, micro_batch) if stage < self.last else ()
                input_grads = self.stages[stage].backward(micro_batch, grads, split=part is Part.INPUT)
                self.send_gradient(stage, micro_batch, input_grads)
            case Overlap(forward, backward) if action in self.overlapped:
                first, second = self.stages[forward.stage], self.stages[backward.stage]
                self.overlap(first, forward.micro_batch, second, backward.micro_batch)
            case Overlap(forward, backward):
                self.compute(forward)
                self.compute(backward)

    def forward(self, stage: Stage, micro_batch: int) -> None:
        inputs = self.receive(Flow.ACTIVATION, stage.index, micro_batch)
        criterion, labels = self.objective(stage, micro_batch)
        self.send_activation(stage.index, micro_batch, *stage.forward(micro_batch, inputs, criterion, labels))

    def overlap(self, first: Stage, micro_batch0: int, second: Stage, micro_batch1: int) -> None:
        """One forward and one backward in the hands of the module's own `overlapped_forward_backward`."""
        inputs0 = self.receive(Flow.ACTIVATION, first.index, micro_batch0)
        criterion0, labels0 = self.objective(first, micro_batch0)
        chunk1 = second.chunks[micro_batch1]
        grads1 = self.receive(Flow.GRADIENT, second.index, micro_batch1) if second.index < self.last else ()
        pairs = [(o, g) for o, g in zip(chunk1.outputs, grads1, strict=True) if o.requires_grad]

        def hand_back() -> None:
            if micro_batch1 in second.chunks:
                self.send_gradient(second.index, micro_batch1, second.finish_backward(micro_batch1))
                send = Send(second.index, micro_batch1, Flow.GRADIENT)
                if (send.stage, send.micro_batch, send.flow) in self.leaving:
                    self.sent_early[send] = self.send(send)

        method = type(first.module).overlapped_forward_backward  # type: ignore[attr-defined]
        ours = Segmented.overlapped_forward_backward.__func__  # type: ignore[attr-defined]
        if getattr(method, "__func__", None) is ours:  # it says when, before the last weight gradients
            method = partial(method, on_input_grads=hand_back)
        outputs0, loss0 = method(
            first.module,
            list(inputs0),
            criterion0,
            list(labels0),
            second.module,
            chunk1.loss,
            [output for output, _ in pairs],
            [grad for _, grad in pairs],
        )
        outputs0 = as_tuple(outputs0)
        first.save_for_backward(micro_batch0, inputs0, outputs0, loss0)
        self.send_activation(first.index, micro_batch0, outputs0, loss0)
        hand_back()

    def objective(self, stage: Stage, micro_batch: int) -> tuple[Criterion | None, Tensors]:
        if stage.index < self.last or self.criterion is None:
            return None, ()
        return self.criterion, tuple(self.labels.get(micro_batch, ()))

    # ---- What goes in and out ----

    def receive(self, flow: Flow, stage: int, micro_batch: int) -> Tensors:
        """The inputs (ACTIVATION) or output gradients (GRADIENT) of a stage; waits until they are there."""
        tensors = self.arriving[flow].pop((stage, micro_batch)).wait()
        if flow is Flow.ACTIVATION and stage > 0 and torch.is_grad_enabled():
            for tensor in tensors:
                tensor.requires_grad_(tensor.is_floating_point())
        return tensors

    def send_activation(self, stage: int, micro_batch: int, outputs: Tensors, loss: Tensor | None) -> None:
        """After a forward: pass the outputs to the next stage, or keep the loss and outputs of the last."""
        if stage < self.last:
            self._pass_on(stage, micro_batch, Flow.ACTIVATION, outputs)
            return
        if loss is not None:
            self.result.losses[micro_batch] = loss.detach()
        if self.return_outputs:
            self.result.outputs[micro_batch] = tuple(_detached(output) for output in outputs)

    def send_gradient(self, stage: int, micro_batch: int, input_grads: Tensors) -> None:
        """After a backward: pass the input gradients to the previous stage."""
        if stage > 0:
            self._pass_on(stage, micro_batch, Flow.GRADIENT, input_grads)

    def _pass_on(self, stage: int, micro_batch: int, flow: Flow, tensors: Tensors) -> None:
        neighbour = stage + 1 if flow is Flow.ACTIVATION else stage - 1
        # A stage may return None beside tensors when nothing is to be trained; it does not travel.
        tensors = tuple(tensor.detach() for tensor in tensors if tensor is not None)
        if self.schedule.rank_of(neighbour, micro_batch) == self.p2p.rank:
            self.arriving[flow][neighbour, micro_batch] = Receiving(tensors)
        else:
            self._check_specs(stage, flow, tensors)
            if not torch.is_grad_enabled():
                # Without autograd a module may reuse its output buffer while it is still being sent.
                tensors = tuple(tensor.clone() for tensor in tensors)
            self.leaving[stage, micro_batch, flow] = tensors

    def send(self, step: Send) -> Sending:
        return self.p2p.send(self.leaving.pop((step.stage, step.micro_batch, step.flow)), self._peer(step))

    def recv(self, step: Recv) -> None:
        received = self.p2p.recv(self._specs(step.flow), self._peer(step))
        self.arriving[step.flow][step.stage, step.micro_batch] = received

    def _peer(self, step: Send | Recv) -> int:
        other = counterpart(step)
        return self.schedule.rank_of(other.stage, other.micro_batch)

    def _specs(self, flow: Flow):
        specs = self.p2p.specs
        return specs if flow is Flow.ACTIVATION else tuple(spec for spec in specs if spec.has_gradient)

    def _check_specs(self, stage: int, flow: Flow, tensors: Tensors) -> None:
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        expected = [(spec.shape, spec.dtype) for spec in self._specs(flow)]
        if got != expected:
            what = "outputs" if flow is Flow.ACTIVATION else "input gradients"
            raise ValueError(f"stage {stage} produced {what} {got}, but the pipeline carries {expected}")


def describe(step: Step) -> str:
    """The step in the schedule's notation, and in words: `0F3 (stage 0, micro-batch 3)`."""
    acts = halves(step) if isinstance(step, Forward | Backward | Overlap) else (step,)
    return f"{step} ({'; '.join(f'stage {act.stage}, micro-batch {act.micro_batch}' for act in acts)})"


def _detached(tensor: Tensor | None) -> Any:
    return None if tensor is None else tensor.detach()
