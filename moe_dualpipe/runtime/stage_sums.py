"""Sums of gradients and all-gathers of weights, stage by stage, while the pipeline runs.

The gradients of a stage are complete after its last backward on a rank. Then their sum over replicas starts, while the
pipeline still drains: a reduce-scatter, after which each tensor's owner has its sum. With ZeRO, only the owner needs
it, and the owners' new weights are gathered while the next step starts. Without ZeRO, the sums are gathered instead.

All ranks of a group must launch the same collectives in the same order. So each group launches its stages in an order
that depends only on the schedule (schedule/stage_order.py): a stage that is complete earlier on this rank waits for its
turn.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..overlap.annotation import annotation
from ..overlap.labels import GATHER_WEIGHTS, SUM_GRADIENTS, WAIT_FOR
from ..schedule import Schedule
from ..schedule.stage_order import order_of_completion, order_of_use
from .background import AllGather, Background, ReduceScatter
from .replicas import ReplicaSet, Shards


@dataclass(frozen=True)
class StageOrder:
    """The stages that hold each parameter on this rank, and the orders of all stages, which are equal on all ranks.

    Without stages, all parameters are treated as those of one stage.
    """

    holders: Mapping[str, frozenset[int]]
    completion: tuple[int, ...] = ()
    use: tuple[int, ...] = ()

    @classmethod
    def of(cls, schedule: Schedule, stages: Mapping[int, nn.Module]) -> "StageOrder":
        names = {index: {name for name, _ in stage.named_parameters()} for index, stage in stages.items()}
        holders = {name: frozenset(s for s in names if name in names[s]) for held in names.values() for name in held}
        return cls(holders, order_of_completion(schedule), order_of_use(schedule))


@dataclass(frozen=True, slots=True)
class StageParameters:
    """The parameters of a replica set that the same stages of this rank hold."""

    shards: Shards
    stages: frozenset[int]
    parameters: tuple[str, ...]

    def __str__(self) -> str:
        return "shared parameters" if self.shards.replicas.shared else f"stage {min(self.stages, default='?')}"

    @property
    def group(self) -> dist.ProcessGroup:
        assert self.shards.group is not None
        return self.shards.group

    def gradients(self) -> dict[str, Tensor]:
        """The gradients by global name. A missing one becomes zero."""
        self.shards.replicas.fill_missing_gradients(self.parameters)
        return self.shards.gradients(self.parameters)

    def weights(self) -> dict[str, Tensor]:
        return {name: t.weight for name, t in self.shards.tensors.items() if t.parameter in self.parameters}

    def buckets(self, tensors: Mapping[str, Tensor]) -> Iterator[list[list[Tensor]]]:
        """The tensors in buckets of one dtype."""
        for dtype in dict.fromkeys(t.dtype for t in tensors.values()):
            sizes = {name: t.nbytes for name, t in tensors.items() if t.dtype == dtype}
            yield from ([[tensors[n] for n in names] for names in bucket] for bucket in self.shards.buckets(sizes))


def parts_of(shards: Shards, holders: Mapping[str, frozenset[int]], order: Sequence[int]) -> list[StageParameters]:
    """The parts of a replica set in the order of their stages. Empty without replicas."""
    if shards.group is None:
        return []
    names = shards.replicas.parameters
    held = {name: holders.get(name, frozenset[int]()) for name in names}
    if shards.replicas.shared:  # other ranks hold other stages of them
        held = dict.fromkeys(names, frozenset[int]().union(*held.values()))
    found: dict[frozenset[int], list[str]] = {}
    for name in names:
        found.setdefault(held[name], []).append(name)
    place = {stage: i for i, stage in enumerate(order)}
    ordered = sorted(found, key=lambda stages: max((place[stage] for stage in stages), default=0))
    return [StageParameters(shards, stages, tuple(found[stages])) for stages in ordered]


class GradientSums:
    """Sums of this rank's gradients over replicas. All ranks of a group must use it in the same steps.

    Call `complete(stage)` when the gradients of a stage are complete, or not at all, and `finish` at the end.
    """

    def __init__(self, shards: Sequence[Shards], order: StageOrder, background: Background):
        self.shards, self.background = shards, background
        self.names = [[*one.replicas.parameters] for one in shards]
        self.parts = [parts_of(one, order.holders, order.completion) for one in shards]
        self._begin()

    def _begin(self) -> None:
        self._complete: set[int] = set()
        self._queues = [deque(parts) for parts in self.parts]
        self._sums: list[ReduceScatter] = []
        self._to_gather: list[tuple[list[list[Tensor]], dist.ProcessGroup]] = []

    def complete(self, stage: int) -> None:
        """Start the sums of a stage, unless those of another stage must start first."""
        self._complete.add(stage)
        for queue in self._queues:
            while queue and queue[0].stages <= self._complete:
                self._start(queue.popleft())

    def start_all(self) -> None:
        """Start all sums that have not started."""
        for queue in self._queues:
            while queue:
                self._start(queue.popleft())

    @torch.no_grad()
    def finish(self) -> list[Tensor]:
        """Wait for all sums, and write them into `grad`. Returns the gradients that this rank owns.

        With ZeRO, only these are sums, and parameters without one of them have no gradient.
        """
        self.start_all()
        with annotation(WAIT_FOR + SUM_GRADIENTS):
            self.background.wait([sums.running for sums in self._sums])
            for sums in self._sums:
                sums.finish()
            gathers = [AllGather(bucket, group, self.background) for bucket, group in self._to_gather]
            self.background.wait([gather.running for gather in gathers])
            for gather in gathers:
                gather.finish()
        self._begin()
        owned: list[Tensor] = []
        for shards in self.shards:
            shards.replicas.fill_missing_gradients(shards.updated_parameters)
            grads = shards.gradients(shards.updated_parameters)
            owned += [grads[name] for name in shards.owned]
        return owned

    def _start(self, part: StageParameters) -> None:
        with self.background.named(f"{SUM_GRADIENTS} of {part}"), torch.no_grad():
            for bucket in part.buckets(part.gradients()):
                self._sums.append(ReduceScatter(bucket, part.group, self.background))
                if not part.shards.divide:
                    self._to_gather.append((bucket, part.group))
            for name in {*part.parameters} - part.shards.updated_parameters:
                part.shards.replicas.parameters[name].grad = None


def sum_gradients(replicas: ReplicaSet) -> None:
    """Replace every gradient by its sum over the replicas, at once; a missing gradient counts as zero. Collective.

    Frozen parameters have no gradient.
    """
    device = next((p.device for p in replicas.parameters.values()), torch.device("cpu"))
    whole = Shards(replicas.only(trained=True), divide=False)
    GradientSums([whole], StageOrder({}), Background(device)).finish()


class WeightGathers:
    """All-gathers of the weights that each owner has updated. All ranks of a group must use it in the same steps."""

    def __init__(self, shards: Sequence[Shards], order: StageOrder, background: Background):
        self.background = background
        self.parts = [part for one in shards if one.divide for part in parts_of(one, order.holders, order.use)]
        self._running: list[tuple[StageParameters, AllGather]] = []

    @torch.no_grad()
    def start(self) -> None:
        """Start to send this rank's weights to the replicas, in the order in which the stages are used."""
        self.wait()
        for part in self.parts:
            with self.background.named(f"{GATHER_WEIGHTS} of {part}"):
                gathers = [AllGather(bucket, part.group, self.background) for bucket in part.buckets(part.weights())]
            self._running += [(part, gather) for gather in gathers]

    @torch.no_grad()
    def wait(self, stage: int | None = None) -> None:
        """Wait until the weights of a stage have arrived; None: of all stages."""
        wanted = [gather for part, gather in self._running if stage is None or stage in part.stages or not part.stages]
        if not wanted:
            return
        self._running = [(part, gather) for part, gather in self._running if gather not in wanted]
        with annotation(WAIT_FOR + GATHER_WEIGHTS):
            self.background.wait([gather.running for gather in wanted])
            for gather in wanted:
                gather.finish()
