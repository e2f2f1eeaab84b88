"""The time of a training step: stages from segments, the pipeline by simulation, then gradients and the optimizer."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...overlap.pair_time import LayerSeconds, pair_seconds
from ...schedule import Backward, Costs, Forward, Overlap, build, simulate
from .device import gather, seconds
from .segment_times import ALL, FP8_BYTES, Clock, head_seconds, layer_factors, layer_seconds
from .workload import ELEMENT, PAIRED, Workload

TRANSFER_SHARE = {"all_to_all": 20, "deepep": 20, "hybrid": 8}
"""Multiprocessors that transfers of experts occupy."""
OVERLAP = 0.7
"""Share of the hideable time that overlap hides: 16 H100, Qwen3-30B, 41.25 -> 31.31 s over NCCL and 24.71 ->
20.99 s over HybridEP (NVIDIA-NeMo/Megatron-Bridge@067f987df, skills/nemo-mbridge-perf-expert-parallel-overlap)."""
LEAST = 1e-9
"""Seconds of a stage without layers: a cost must be positive."""
OWNED_BYTES = 30
"""Bytes that the optimizer reads and writes for a parameter: gradient, fp32 weight, two moments, and the new weight."""
HIDDEN_GRADIENTS = 0.8
"""Share of a micro-batch's time that sums of gradients, or gathers of weights, can run beside."""


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a step, and of its parts on the average rank. The parts add up to `seconds`.

    compute: segments, with the transfers of tensor parallelism in them. exposed: transfers of experts, and of keys
    between segments, that nothing hides. idle: waiting for other stages. sums: exposed sums of gradients, and gathers
    of weights. transfers: all of these transfers and sums, hidden or not.
    """

    compute: float
    exposed: float
    idle: float
    sums: float
    optimizer: float
    transfers: float

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed + self.idle + self.sums + self.optimizer

    @property
    def bubble(self) -> float:
        """The share of the pipeline's time in which a rank has nothing to do, on average."""
        return self.idle / (self.compute + self.exposed + self.idle)

    @property
    def hidden(self) -> float:
        """The share of the transfers that computation hides. 1 if there are none."""
        return max(0.0, 1 - (self.exposed + self.sums) / self.transfers) if self.transfers else 1.0


@dataclass(frozen=True, slots=True)
class _Stage:
    """One micro-batch on one stage. pair: a forward and a backward that overlap."""

    forward: float
    backward: float
    weights: float
    pair: float
    transfers: float


def step_of(load: Workload, on: Collection[str] = ALL) -> StepSeconds:
    """Predict a step. on: the effects that count (EFFECTS)."""
    stages = _stages(load, on)
    share = load.num_micro_batches / load.layout.pp
    compute = share * sum(s.forward + s.backward - s.transfers for s in stages)
    busy = share * sum(s.pair for s in stages)
    sums, exposed_sums = _gradients(load, stages) if "gradients" in on else (0.0, 0.0)
    transfers = share * sum(s.transfers for s in stages)
    exposed, idle = max(0.0, busy - compute), max(0.0, _pipeline_seconds(load, stages, on) - busy)
    if load.layout.pp == 1:  # no rank waits: only the first and last transfers have nothing beside them
        waits = exposed + idle
        exposed = min(waits, transfers)
        idle = waits - exposed
    return StepSeconds(
        compute=compute, exposed=exposed, idle=idle,
        sums=exposed_sums, optimizer=_optimizer(load, on), transfers=transfers + sums,
    )  # fmt: skip


def _stages(load: Workload, on: Collection[str] = ALL) -> list[_Stage]:
    layers, head = _layers(load, on), head_seconds(load, on)
    stages = []
    for spec in load.stages:
        own = [layers[min(i, len(layers) - 1)] for i in spec.blocks]
        stages.append(_stage(load, own + [head] * (1 + load.shape.mtp) * spec.head))
    return stages


def _layers(load: Workload, on: Collection[str]) -> list[LayerSeconds]:
    layers_and_factors = [*zip(load.shape.layers, layer_factors(load, on), strict=True)]
    kinds = {kind: layer_seconds(load, kind[0], on, kind[1]) for kind in {*layers_and_factors}}
    return [kinds[kind] for kind in layers_and_factors]


def _stage(load: Workload, own: Sequence[LayerSeconds]) -> _Stage:
    slower = min(1.0, TRANSFER_SHARE[load.ep_backend] / load.device.sms)
    forward = sum(one.seconds_f for one in own)
    backward = sum(one.seconds_b for one in own)
    gain = max(0.0, forward + backward - pair_seconds(own, own, slower, load.opens)) if load.overlaps else 0.0
    host = sum(one.host for one in own)
    pair = max(forward + backward - OVERLAP * gain, 3 * host)
    transfers = sum(one.transfers for one in own)
    forward, backward = max(forward, host), max(backward, 2 * host)
    return _Stage(forward, backward, sum(one.weights for one in own), pair, transfers)


def layer_costs(load: Workload) -> list[float]:
    """Seconds of each layer for a micro-batch, forward and backward after overlap. The last one has the head, too."""
    head = _stage(load, [head_seconds(load)] * (1 + load.shape.mtp)).pair
    costs = [_stage(load, [layer]).pair for layer in _layers(load, ALL)]
    return [*costs[:-1], costs[-1] + head]


def stage_costs(load: Workload, stages: Sequence[_Stage] | None = None) -> Costs:
    """Seconds of the actions of a pipeline on each stage."""
    stages = stages or _stages(load)
    stage_bytes = ELEMENT * load.rank_tokens * load.shape.hidden
    link = load.device.domain if load.layout.num_ranks <= (load.device.domain.gpus or 1) else load.device.network
    # In schedules without pairs, each backward runs beside the forward of a later micro-batch.
    backwards = tuple(max(LEAST, s.backward - _gain(load, s)) for s in stages)
    return Costs(
        tuple(max(LEAST, s.forward) for s in stages), backwards,
        tuple(min(max(LEAST / 2, s.weights), 0.9 * b) for s, b in zip(stages, backwards, strict=True)),
        tuple(max(LEAST, s.pair) for s in stages), comm=seconds(link, stage_bytes) if load.layout.pp > 1 else 0.0,
    )  # fmt: skip


def _gain(load: Workload, stage: _Stage) -> float:
    return 0.0 if load.schedule in PAIRED else stage.forward + stage.backward - stage.pair


def _pipeline_seconds(load: Workload, stages: Sequence[_Stage], on: Collection[str]) -> float:
    """Seconds of the forwards and backwards of all micro-batches."""
    if "pipeline" not in on:
        return load.num_micro_batches / load.layout.pp * sum(stage.pair for stage in stages)
    most = max(_gain(load, stage) for stage in stages)
    return simulate_step(load, load.num_micro_batches, stage_costs(load, stages)) + most


def simulate_step(load: Workload, num_micro_batches: int, costs: Costs) -> float:
    """The makespan. Once a pipeline is full, each further micro-batch takes as long as the one before.

    So a step of many micro-batches is extrapolated from two shorter ones. A rank with more work than others may delay
    them only later.
    """
    pp, n, chunks = load.layout.pp, num_micro_batches, load.layout.chunks
    short, long = 4 * pp, 6 * pp
    if n <= long:
        try:
            return simulate(build(load.schedule, pp, n, chunks), costs).makespan
        except ValueError:
            pass  # this number of micro-batches is between two that the schedule can run
    a, b = (simulate(build(load.schedule, pp, count, chunks), costs).makespan for count in (short, long))
    return b + (n - long) * max((b - a) / (long - short), _most_work(load, costs))


def _most_work(load: Workload, costs: Costs) -> float:
    """Seconds of a micro-batch on the rank with the most work: in the long run, no step is faster."""
    stages = range(load.placement.num_stages)
    work = [costs.of(Overlap(Forward(s, 0), Backward(s, 0))) if load.schedule in PAIRED else
            costs.of(Forward(s, 0)) + costs.of(Backward(s, 0)) for s in stages]  # fmt: skip
    return max(sum(work[s] for s in own) for own in load.placement.stages) / len(load.placement.routes)


def _gradients(load: Workload, stages: Sequence[_Stage]) -> tuple[float, float]:
    """Seconds of the sums of gradients and of gathering the new weights, and how much of that is exposed."""
    dense, experts = rank_parameters(load)
    one = load.layout
    forward, backward = max(s.forward for s in stages), max(s.backward for s in stages)
    sums = gathers = 0.0
    for numbers, ranks, distance in (
        (dense, one.dp * one.cp, one.tp),
        (experts, load.expert_replicas, one.ep * load.expert_tp),
    ):
        sums += gather(load.device, 4 * numbers, ranks, distance)
        gathers += gather(load.device, ELEMENT * numbers, ranks, distance)
    exposed = max(0.05 * sums, sums - HIDDEN_GRADIENTS * backward)
    exposed += max(0.05 * gathers, gathers - HIDDEN_GRADIENTS * forward)
    return sums + gathers, exposed


def rank_parameters(load: Workload) -> tuple[float, float]:
    """Parameters of the average rank: those with a copy on each data-parallel rank, and those of its experts."""
    one, shape = load.layout, load.shape
    copies = 2 if load.schedule in ("dualpipe", "chimera") else 1  # mirrored ranks hold the same stages
    return (copies * shape.dense_parameters / (one.tp * one.pp),
            copies * shape.expert_parameters / (one.ep * load.expert_tp * one.pp))  # fmt: skip


def _optimizer(load: Workload, on: Collection[str]) -> float:
    if "optimizer" not in on:
        return 0.0
    dense, experts = rank_parameters(load)
    one, rounded = load.layout, experts * (load.fp8 != "off")  # each weight for both of its products
    if load.zero:
        dense, experts = dense / (one.dp * one.cp), experts / load.expert_replicas
    return Clock(load.device, load.precision, ALL).memory(OWNED_BYTES * (dense + experts) + 2 * FP8_BYTES * rounded)
