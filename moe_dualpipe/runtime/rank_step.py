"""One step on one rank: runs the rank's list of actions and transfers.

All state of a step is in one object, which is dropped when the step ends.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..overlap.annotation import annotation
from ..schedule import Action, Backward, Flow, Forward, Overlap, Part, Recv, Schedule, Send, Step, counterpart, members
from ..schedule.stage_order import last_gradients
from .p2p import P2P, Message, TensorSpec
from .stage import Criterion, Stage, Tensors, as_tuple

SENDS_IN_FLIGHT = 2  # after this many more compute actions, wait for a send, to free its buffer


@dataclass(frozen=True, slots=True)
class StepResult:
    """Losses and outputs of the last stage, by micro-batch; empty on ranks that do not hold the last stage."""

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensors] = field(default_factory=dict)


@dataclass
class RankStep:
    """The state of one step on one rank; see `Executor.step` for the arguments."""

    schedule: Schedule
    p2p: P2P
    stages: dict[int, Stage]
    overlapped: frozenset[Overlap]
    labels: Mapping[int, Sequence[Any]]
    context: Mapping[int, Sequence[Any]]
    criterion: Criterion | None
    return_outputs: bool
    on_action: Callable[[Action], None] | None = None
    before_stage: Callable[[int], None] | None = None
    on_gradients: Callable[[int], None] | None = None

    def __post_init__(self) -> None:
        self.last = self.schedule.num_stages - 1
        # Inputs (ACTIVATION) and output gradients (GRADIENT), by (stage, micro-batch).
        self.receiving: dict[Flow, dict[tuple[int, int], Message]] = {Flow.ACTIVATION: {}, Flow.GRADIENT: {}}
        self.sends: deque[Send] = deque()  # not yet started, in the order of the list
        self.to_send: dict[Send, Tensors] = {}
        self.sending: deque[tuple[int, Send, Message]] = deque()  # with `num_actions` at its start
        self.num_actions = 0
        self.used: set[int] = set()  # stages
        self.last_gradients = last_gradients(self.schedule.actions[self.p2p.rank])
        self.result = StepResult()

    def run(self, steps: tuple[Step, ...], inputs: Mapping[int, Sequence[Tensor]]) -> StepResult:
        for micro_batch, tensors in inputs.items():
            self.receiving[Flow.ACTIVATION][0, micro_batch] = Message(tuple(tensors))
        self.sends.extend(step for step in steps if isinstance(step, Send))
        for step in steps:
            try:
                match step:
                    case Recv():
                        self.post_receive(step)
                    case Send():
                        self.start_sends()
                    case _:
                        while self.sending and self.sending[0][0] <= self.num_actions - SENDS_IN_FLIGHT:
                            self.finish_send()
                        self.num_actions += 1
                        if self.on_action:
                            self.on_action(step)
                        self.begin_stages(step)
                        with annotation(str(step)):
                            for action in (step,) if step in self.overlapped else members(step):
                                self.compute(action)
                        self.end_stages(step)
            except Exception as error:
                rank = dist.get_rank() if dist.is_initialized() else 0
                where = f"rank {rank} (pipeline rank {self.p2p.rank})"
                error.add_note(f"while {where} ran {_describe(step)} of {self.schedule.name}")
                raise
        while self.sending:
            self.finish_send()
        return self.result

    # ---- Stages ----

    def begin_stages(self, action: Action) -> None:
        for stage in {member.stage for member in members(action)} - self.used:
            self.used.add(stage)
            if self.before_stage:
                self.before_stage(stage)

    def end_stages(self, action: Action) -> None:
        for stage, last in self.last_gradients.items():
            if self.on_gradients and last == action:
                self.on_gradients(stage)

    # ---- Compute ----

    def compute(self, action: Forward | Backward | Overlap) -> None:
        match action:
            case Forward(stage, micro_batch):
                inputs = self.receive(Flow.ACTIVATION, stage, micro_batch)
                criterion, labels = self.loss_arguments(stage, micro_batch)
                context = self.context.get(micro_batch, ())
                outputs, loss = self.stages[stage].forward(micro_batch, inputs, criterion, labels, context)
                self.send_activation(stage, micro_batch, outputs, loss)
            case Backward(stage, micro_batch, Part.WEIGHT):
                self.stages[stage].backward_weights(micro_batch)
            case Backward(stage, micro_batch, part):
                grads = self.output_grads(stage, micro_batch)
                input_grads = self.stages[stage].backward(micro_batch, grads, split=part is Part.INPUT)
                self.send_gradient(stage, micro_batch, input_grads)
            case Overlap(forward, backward):
                first, second = self.stages[forward.stage], self.stages[backward.stage]
                self.overlap(first, forward.micro_batch, second, backward.micro_batch)

    def overlap(self, first: Stage, micro_batch0: int, second: Stage, micro_batch1: int) -> None:
        """Run a forward and a backward in one call of the modules' `overlapped_forward_backward`."""
        inputs0 = self.receive(Flow.ACTIVATION, first.index, micro_batch0)
        criterion0, labels0 = self.loss_arguments(first.index, micro_batch0)
        chunk1 = second.chunks[micro_batch1]
        grads1 = self.output_grads(second.index, micro_batch1)
        pairs = [(o, g) for o, g in zip(chunk1.outputs, grads1, strict=True) if o.requires_grad]
        method: Any = type(first.module).overlapped_forward_backward  # type: ignore[attr-defined]
        calls = 0

        def on_input_grads() -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                self.send_gradient(second.index, micro_batch1, second.finish_backward(micro_batch1))
                self.start_sends()

        forward = first.module, [*inputs0, *self.context.get(micro_batch0, ())], criterion0, list(labels0)
        backward = second.module, chunk1.loss, [output for output, _ in pairs], [grad for _, grad in pairs]
        early = "on_input_grads" in signature(method).parameters
        outputs0, loss0 = method(*forward, *backward, **({"on_input_grads": on_input_grads} if early else {}))
        del forward, backward, pairs, grads1
        outputs0 = as_tuple(outputs0)
        first.save_for_backward(micro_batch0, inputs0, outputs0, loss0)
        self.send_activation(first.index, micro_batch0, outputs0, loss0)
        if not early:
            self.send_gradient(second.index, micro_batch1, second.finish_backward(micro_batch1))
        elif calls != 1:
            name = f"{type(first.module).__name__}.overlapped_forward_backward"
            raise RuntimeError(f"{name} must call on_input_grads once: it made {calls} calls")

    def loss_arguments(self, stage: int, micro_batch: int) -> tuple[Criterion | None, tuple[Any, ...]]:
        """The criterion and its labels on the last stage, if there is a criterion; (None, ()) otherwise."""
        if stage < self.last or self.criterion is None:
            return None, ()
        return self.criterion, tuple(self.labels.get(micro_batch, ()))

    # ---- Inputs and results of stages ----

    def receive(self, flow: Flow, stage: int, micro_batch: int) -> Tensors:
        """Wait for the inputs (ACTIVATION) or output gradients (GRADIENT) of a stage and return them."""
        transfer, step = self.receiving[flow].pop((stage, micro_batch)), Recv(stage, micro_batch, flow)
        tensors = self.p2p.wait(transfer, step, self._peer(step)) if transfer.works else transfer.tensors
        if flow is Flow.ACTIVATION and stage > 0 and torch.is_grad_enabled():
            for tensor in tensors:
                tensor.requires_grad_(tensor.is_floating_point())
        return tensors

    def output_grads(self, stage: int, micro_batch: int) -> Tensors:
        return self.receive(Flow.GRADIENT, stage, micro_batch) if stage < self.last else ()

    def send_activation(self, stage: int, micro_batch: int, outputs: Tensors, loss: Tensor | None) -> None:
        """After a forward: send the outputs to the next stage, or store the loss and outputs of the last stage."""
        if stage < self.last:
            self._send_to_neighbor(stage, micro_batch, Flow.ACTIVATION, outputs)
            return
        if loss is not None:
            self.result.losses[micro_batch] = loss.detach()
        if self.return_outputs:
            self.result.outputs[micro_batch] = tuple(o if o is None else o.detach() for o in outputs)

    def send_gradient(self, stage: int, micro_batch: int, input_grads: Tensors) -> None:
        """After a backward: send the input gradients to the previous stage."""
        if stage > 0:
            self._send_to_neighbor(stage, micro_batch, Flow.GRADIENT, input_grads)

    def _send_to_neighbor(self, stage: int, micro_batch: int, flow: Flow, tensors: Tensors) -> None:
        neighbor = stage + 1 if flow is Flow.ACTIVATION else stage - 1
        # In inference a stage may also return None, which is not sent.
        tensors = tuple(tensor.detach() for tensor in tensors if tensor is not None)
        if self.schedule.rank_of(neighbor, micro_batch) == self.p2p.rank:
            self.receiving[flow][neighbor, micro_batch] = Message(tensors)
            return
        self._check_specs(stage, flow, tensors)
        if not torch.is_grad_enabled():
            # Without autograd a module may reuse its output buffer while it is still being sent.
            tensors = tuple(tensor.clone() for tensor in tensors)
        self.to_send[Send(stage, micro_batch, flow)] = tensors

    # ---- Transfers ----

    def start_sends(self) -> None:
        """Start the sends that come next in the list and have their data."""
        while self.sends and self.sends[0] in self.to_send:
            step = self.sends.popleft()
            self.sending.append((self.num_actions, step, self.send(step)))

    def finish_send(self) -> None:
        """Wait for the oldest send, and free its buffer."""
        _, step, transfer = self.sending.popleft()
        self.p2p.wait(transfer, step, self._peer(step))

    def send(self, step: Send) -> Message:
        return self.p2p.send(self.to_send.pop(step), self._peer(step))

    def post_receive(self, step: Recv) -> None:
        transfer = self.p2p.recv(self._specs(step.flow), self._peer(step))
        self.receiving[step.flow][step.stage, step.micro_batch] = transfer

    def _peer(self, step: Send | Recv) -> int:
        other = counterpart(step)
        return self.schedule.rank_of(other.stage, other.micro_batch)

    def _specs(self, flow: Flow) -> tuple[TensorSpec, ...]:
        specs = self.p2p.specs
        return specs if flow is Flow.ACTIVATION else tuple(spec for spec in specs if spec.has_gradient)

    def _check_specs(self, stage: int, flow: Flow, tensors: Tensors) -> None:
        got = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        expected = [(spec.shape, spec.dtype) for spec in self._specs(flow)]
        if got != expected:
            what = "outputs" if flow is Flow.ACTIVATION else "input gradients"
            raise ValueError(f"stage {stage} produced {what} {got}, but the pipeline carries {expected}")


def _describe(step: Step) -> str:
    """The step in the schedule's notation and in words: `0F3 (stage 0, micro-batch 3)`."""
    acts = members(step) if isinstance(step, Forward | Backward | Overlap) else (step,)
    return f"{step} ({'; '.join(f'stage {act.stage}, micro-batch {act.micro_batch}' for act in acts)})"
