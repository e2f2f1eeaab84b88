"""What is to be planned: a model on some GPUs, how the work is divided over them, and how it is run.

Raises ValueError, on one line, for numbers that contradict each other; the message names the nearest that fit.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from ...models.shape import ModelShape
from ...schedule.build import check_micro_batches, placement_of
from ...schedule.placement import Placement
from .device import Device
from .measured_loads import MeasuredLoads
from .transfer_times import EpBackend

Precision = Literal["bf16", "fp8", "mxfp8", "fp32"]
Recompute = Literal["none", "norms", "attention", "full"]
Routing = Literal["balanced", "real"]
PAIRED = ("dualpipe", "dualpipev")
"""Schedules whose actions are pairs of a forward and a backward."""


@dataclass(frozen=True, slots=True)
class Division:
    """How many GPUs share what. tp: each matrix (tensor parallelism). pp: the layers. cp: each sequence. ep: experts.

    vpp: stages of a pipeline rank, for the schedule interleaved_1f1b. Expert groups are formed from all ranks of a
    stage, tensor-parallel ranks included, and no expert is divided. With ep 1, tensor parallelism divides experts too.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    ep: int = 1
    cp: int = 1

    @property
    def dp(self) -> int:
        """Replicas of the model."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def expert_tp(self) -> int:
        """Ranks that divide the matrices of an expert."""
        return self.tp if self.ep == 1 else 1

    @property
    def expert_replicas(self) -> int:
        return self.gpus // (self.pp * self.ep * self.expert_tp)

    def __str__(self) -> str:
        vpp = f" vpp {self.vpp}" if self.vpp > 1 else ""
        return f"tp {self.tp} pp {self.pp}{vpp} ep {self.ep} cp {self.cp} dp {self.dp}"


@dataclass(frozen=True)
class Workload:
    """One training step of `shape`. seq: tokens of a sequence. micro_batch, global_batch: sequences.

    overlap: transfers of experts run beside the computation of another micro-batch, in every schedule, as in
    Megatron-LM. None: only in schedules whose actions are pairs (PAIRED), as in this project. zero: the optimizer state
    is divided over replicas. flash: attention in one kernel; without it, scores are written to memory. loads: measured
    loads of experts, instead of `routing`.
    """

    shape: ModelShape
    device: Device
    division: Division
    seq: int = 4096
    micro_batch: int = 1
    global_batch: int = 1024
    precision: Precision = "bf16"
    schedule: str = "1f1b"
    recompute: Recompute = "none"
    ep_backend: EpBackend = "all_to_all"
    overlap: bool | None = None
    routing: Routing = "balanced"
    zero: bool = True
    flash: bool = True
    loads: MeasuredLoads | None = None

    @cached_property
    def num_micro_batches(self) -> int:
        """Micro-batches of a pipeline in a step."""
        return self.global_batch // (self.micro_batch * self.division.dp)

    @property
    def num_chunks(self) -> int | None:
        """Stages of a rank, for the schedule that has a choice."""
        return self.division.vpp if self.schedule == "interleaved_1f1b" else None

    @cached_property
    def placement(self) -> Placement:
        return placement_of(self.schedule, self.division.pp, self.num_chunks)

    @property
    def overlaps(self) -> bool:
        """Whether transfers of experts run beside computation."""
        return self.schedule in PAIRED if self.overlap is None else self.overlap

    @property
    def element(self) -> int:
        """Bytes of a number outside of products in 8 bits."""
        return 4 if self.precision == "fp32" else 2

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.seq

    @property
    def rank_tokens(self) -> float:
        """Tokens of a micro-batch on a rank, where tensor-parallel ranks share the sequence (norms and experts)."""
        return self.micro_batch * self.seq / (self.division.cp * self.division.tp)

    def check(self) -> None:
        """Raise ValueError if this cannot run."""
        one = self.division
        for name, number in [
            *((name, getattr(one, name)) for name in ("gpus", "tp", "pp", "vpp", "ep", "cp")),
            ("seq", self.seq), ("micro-batch", self.micro_batch), ("global-batch", self.global_batch),
        ]:  # fmt: skip
            if number < 1:
                raise ValueError(f"--{name} must be at least 1: got {number}")
        check_choices(self)
        if self.loads is not None:
            self.loads.check(self.shape)
        self._check_division()
        self._check_batches()
        self._check_schedule()

    def _check_division(self) -> None:
        one, shape = self.division, self.shape
        heads = min(layer.attention.heads for layer in shape.layers)
        if heads % one.tp:
            raise ValueError(
                f"--tp {one.tp} does not divide the {heads} attention heads of {shape.name}; "
                f"use {_below(one.tp, heads)}"
            )
        if self.seq % one.cp:
            raise ValueError(f"--cp {one.cp} does not divide --seq-len {self.seq}; use {_below(one.cp, self.seq)}")
        if self.seq // one.cp % one.tp:  # between products, tensor-parallel ranks share the tokens
            most = _below(one.tp, self.seq // one.cp)
            raise ValueError(f"--tp {one.tp} does not divide --seq-len {self.seq} / --cp {one.cp}; use {most}")
        if shape.mtp >= self.seq:
            raise ValueError(f"--seq-len {self.seq} is too short for {shape.mtp} modules of multi-token prediction")
        experts = max(layer.experts for layer in shape.layers)
        if one.ep > 1 and not experts:
            raise ValueError(f"--ep {one.ep}: {shape.name} has no experts; use --ep 1")
        if one.ep > 1 and experts % one.ep:
            raise ValueError(
                f"--ep {one.ep} does not divide the {experts} experts of a layer; use {_below(one.ep, experts)}"
            )
        model = one.tp * one.pp * one.cp
        if one.gpus % model:
            nearest = max(model, round(one.gpus / model) * model)
            raise ValueError(
                f"--gpus {one.gpus} is not a multiple of tp x pp x cp = {one.tp} x {one.pp} x {one.cp} = {model}; "
                f"use {nearest} GPUs"
            )
        ranks = one.gpus // one.pp
        if ranks % one.ep:
            raise ValueError(
                f"--ep {one.ep} does not divide the {ranks} ranks of a pipeline stage ({one.gpus} GPUs / pp {one.pp}); "
                f"use {_below(one.ep, ranks)}"
            )

    def _check_batches(self) -> None:
        each = self.micro_batch * self.division.dp
        if self.global_batch % each:
            nearest = max(each, round(self.global_batch / each) * each)
            raise ValueError(
                f"--batch-size {self.global_batch} is not a multiple of micro-batch x dp = {self.micro_batch} x "
                f"{self.division.dp} = {each}; use {nearest}"
            )

    def _check_schedule(self) -> None:
        one, stages = self.division, self.placement.num_stages
        if one.vpp > 1 and self.schedule != "interleaved_1f1b":
            raise ValueError(f"--vpp {one.vpp} needs --schedule interleaved_1f1b: got {self.schedule}")
        if one.vpp > 1 and one.pp == 1:
            raise ValueError(f"--vpp {one.vpp} needs --pp of at least 2: got 1")
        if len(self.shape.layers) + 2 < stages:  # the embedding and the head may be stages of their own
            raise ValueError(
                f"{self.shape.name} has {len(self.shape.layers)} layers, too few for {stages} pipeline stages; "
                "use a smaller --pp or --vpp"
            )
        if self.schedule in ("gpipe", "1f1b", "interleaved_1f1b"):
            return  # as in Megatron-LM, any number of micro-batches
        each = self.micro_batch * one.dp
        check_micro_batches(self.schedule, one.pp, self.num_micro_batches, lambda n: f"--batch-size {n * each}")


def check_choices(load: Workload) -> None:
    """Raise ValueError for an option that is none of its choices, or a precision that the device lacks."""
    choices = {"precision": Precision, "recompute": Recompute, "ep_backend": EpBackend, "routing": Routing}
    for name, kind in choices.items():
        if (got := getattr(load, name)) not in get_args(kind):
            raise ValueError(f"--{name.replace('_', '-')} must be one of {', '.join(get_args(kind))}: got {got}")
    if load.device.peak.get(load.precision) is None:
        known = ", ".join(name for name, peak in load.device.peak.items() if peak is not None)
        raise ValueError(f"{load.device.name} does not support --dtype {load.precision}: use {known}")


def _below(number: int, of: int) -> int:
    """The largest divisor of `of` that is at most `number`."""
    return next(n for n in range(min(number, of), 0, -1) if of % n == 0)
