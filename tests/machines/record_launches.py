"""Record what every rank launches in a training step, in one process and without a GPU.

The pipeline, executor, engine and layers are those of a real run. Only the process groups differ (recording_group.py),
and the model is tiny: it has the same layers, with few channels. Each data-parallel rank has its own tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from unittest.mock import patch

import torch
from torch import Tensor

from moe_dualpipe.models import ModelConfig, StageOptions
from moe_dualpipe.overlap import Engine
from moe_dualpipe.overlap.labels import FORWARD, letter_of
from moe_dualpipe.pipeline import Numerics, Parallel, Pipeline
from moe_dualpipe.pipeline import pipeline as pipeline_module
from moe_dualpipe.runtime import executor as executor_module
from moe_dualpipe.runtime.background import Background
from moe_dualpipe.runtime.groups import create_group
from moe_dualpipe.runtime.p2p import Message
from moe_dualpipe.runtime.rank_step import RankStep
from moe_dualpipe.runtime.replicas import Shards
from moe_dualpipe.runtime.stage_sums import WeightGathers
from moe_dualpipe.schedule import Action, Recv, Schedule, Send, members
from moe_dualpipe.schedule.comms import carried
from moe_dualpipe.schedule.walk import result_name
from tests.support.engines import run_on

from .launches import Program
from .recording_group import Recorder, recording_world

LENGTH = 3  # tokens in a sequence


def tiny_model(num_layers: int, dense_layers: tuple[int, ...] = (), ep: int = 1, mtp_layers: int = 0) -> ModelConfig:
    """A model whose steps take little time. dense_layers: the layers without experts."""
    return ModelConfig(
        vocab_size=5, hidden_size=4, num_layers=num_layers, num_dense_layers=0, dense_layers=dense_layers, num_heads=1,
        num_kv_heads=1, head_dim=2, dense_size=4, expert_size=4, num_experts=2 * ep, mtp_layers=mtp_layers,
    )  # fmt: skip


def record_launches(
    model: ModelConfig, schedule: Schedule, ep: int, queued: bool, options: StageOptions | None = None,
    change: Callable[[int, Pipeline], None] | None = None,
) -> list[Program]:  # fmt: skip
    """Return what each rank launches and waits for in one step and its update with ZeRO.

    There are `ep` data-parallel ranks, which share the experts. queued: record as on a GPU, where the host queues work
    and each direction of the pipeline has its own process group. change: called with each rank and its pipeline, before
    the step.
    """
    size = schedule.num_ranks * ep
    return [_record(model, schedule, ep, queued, options, change, rank, size) for rank in range(size)]


def _record(
    model: ModelConfig, schedule: Schedule, ep: int, queued: bool, options: StageOptions | None,
    change: Callable[[int, Pipeline], None] | None, rank: int, num_ranks: int,
) -> Program:  # fmt: skip
    with recording_world(rank, num_ranks) as world:
        now = _Now(Engine(torch.device("cpu"), queued))
        shape = 1, LENGTH + model.mtp_layers
        numerics = Numerics(options=options or StageOptions())
        pipeline = Pipeline(model, schedule, shape, Parallel(ep, "all_to_all"), numerics, on_action=now.begin)
        recorder = Recorder(now.describe, serial_links=queued)
        executor, groups = pipeline.executor, vars(pipeline.groups) | {"world": world}
        groups.pop("links")  # this world has no NCCL
        if queued and groups["pipeline"] is not None:
            members = groups.pop("pipeline").ranks
            groups |= {f"pipeline {way}": create_group(members, members_only=True) for way in ("up", "down")}
            executor.p2p = replace(executor.p2p, upward=groups["pipeline up"], downward=groups["pipeline down"])
        for name, group in groups.items():
            if group is not None:
                group.purpose, group.recorder = name.replace("_", " "), recorder
        if change is not None:
            change(rank, pipeline)
        tokens = tokens_of(model, schedule, rank % ep)
        now.background = pipeline.background
        recorded = patch.object(executor_module, "RankStep", partial(_RecordedStep, now=now))
        same = patch.object(pipeline_module, "all_equal", return_value=True)  # in this world, a sum is the own value
        with run_on(now.engine), recorded, same:
            run_step(pipeline, tokens)
        return recorder.program


def run_step(pipeline: Pipeline, tokens: Tensor) -> None:
    """Run the step of a rank, with the communication of an update with ZeRO. tokens: from `tokens_of`. Collective."""
    pipeline.divided = True
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    pipeline.step(inputs, labels, sum_gradients=True, num_labels=labels.numel() * pipeline.layout.dp)
    pipeline.sum_gradients()
    shards = [Shards(one.only(trained=True), divide=True) for one in pipeline.replicas]
    gathers = WeightGathers(shards, pipeline.order, pipeline.background)
    gathers.start()
    gathers.wait()


def tokens_of(model: ModelConfig, schedule: Schedule, data_rank: int) -> Tensor:
    """Random token ids. Each sequence has one more than the step's inputs, for the labels."""
    shape = schedule.num_micro_batches, LENGTH + model.mtp_layers + 1
    return torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(data_rank))


@dataclass
class _Now:
    """What a rank is doing: its action, and the current transfer between stages, segment of the engine, or start of
    collectives that run in the background."""

    engine: Engine
    action: Action | None = None
    transfer: Send | Recv | None = None
    background: Background | None = None

    def begin(self, action: Action | None) -> None:
        self.action = action

    def describe(self, operation: str) -> str:
        if self.transfer is not None:
            return f"{result_name(carried(self.transfer))} from {operation}"
        if self.background is not None and self.background.starting:
            return f"{self.background.starting}, {operation}"
        if self.engine.running is None or self.action is None:
            return operation
        text, layer = self.engine.running
        member = members(self.action)[0 if letter_of(text) == FORWARD else -1]
        return f"{text} of layer {layer}, micro-batch {member.micro_batch}"


@dataclass
class _RecordedStep(RankStep):
    now: _Now = field(kw_only=True)

    def send(self, step: Send) -> Message:
        with self._named(step):
            return super().send(step)

    def post_receive(self, step: Recv) -> None:
        with self._named(step):
            super().post_receive(step)

    @contextmanager
    def _named(self, step: Send | Recv) -> Iterator[None]:
        self.now.transfer = step
        try:
            yield
        finally:
            self.now.transfer = None
