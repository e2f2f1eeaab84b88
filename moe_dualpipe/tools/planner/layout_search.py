"""All ways to divide a model over some GPUs, ranked by predicted step time.

There are thousands. First, a quick estimate ranks all of them; it assumes that all stages take the same time. Then, in
this order, the first way of each layout and schedule that fits into memory is simulated with the cost of each stage,
until there are SIMULATED of them. The fastest of these are also tried with other numbers of layers per stage
(stages.py).
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from operator import itemgetter

from ...models.config import RECOMPUTE
from ...runtime.layout import Layout, layouts
from ...schedule import NAMES, Costs, build, simulate
from ...schedule.build import takes_chunks
from .constants import find_constant
from .prediction import Estimate
from .segment_times import ALL
from .stages import best_layers, full_schedule, memory_of
from .step import StepSeconds, step_of
from .workload import Workload, layout_of, layout_text

SIMULATED = 40
"""The most candidates that are simulated and returned."""
WITH_TENSOR_PARALLELISM = 10
"""The same for those with tensor parallelism, which train.py lacks."""
UNEVEN = 5
"""Candidates for which other numbers of layers are tried."""
CHUNKS = (2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8)
USABLE = 0.92
"""Share of a GPU's memory for the tensors of the run; the rest is for the CUDA context, libraries and fragmentation."""


def check_searched(load: Workload) -> None:
    """Raise ValueError unless there is a way to run `load`, whatever memory it needs."""
    one = layout_of(load.layout.num_ranks, cp=load.layout.cp)
    dataclasses.replace(load, layout=one, micro_batch=1, global_batch=max(1, one.dp), schedule="1f1b").check()
    if not any(True for layout in _layouts(load) for _ in _variants(dataclasses.replace(load, layout=layout))):
        batch = f"--batch-size {load.global_batch}"
        raise ValueError(f"{batch} cannot be divided into whole micro-batches in any layout of --gpus {one.num_ranks}")


def search(load: Workload, software: str | None = None) -> tuple[Estimate, ...]:
    """The fastest pairs of a layout and a schedule that fit, each with its best micro-batch and recomputation, ranked
    by the time of a step.

    Raises ValueError for options that no layout can run, and if nothing fits; the message names the smallest way.
    """
    check_searched(load)
    constant = find_constant(load, software, strict=True)
    limit = USABLE * load.device.memory_gb * 1e9
    ways = sorted(_ways(load), key=lambda pair: pair[0].seconds)
    found: dict[tuple[Layout, str], Estimate] = {}
    left = {False: SIMULATED, True: WITH_TENSOR_PARALLELISM}
    leanest: dict[tuple[Layout, str], int] = {}
    for _, way in ways:
        key = dataclasses.replace(way.layout, chunks=None), way.schedule
        if key in found or not left[way.layout.tp > 1]:
            continue
        exact_key = way.layout, way.schedule
        if exact_key not in leanest:
            leanest[exact_key] = memory_of(dataclasses.replace(way, micro_batch=1, recompute="full")).total
        if leanest[exact_key] <= limit and (candidate := Estimate(way, constant)).memory.total <= limit:
            found[key] = candidate
            left[way.layout.tp > 1] -= 1
    if not found:
        (layout, _), memory = min(leanest.items(), key=itemgetter(1))
        raise ValueError(
            f"{load.shape.name} on {load.layout.num_ranks} x {load.device.name} does not fit: the smallest layout "
            f"({layout_text(layout)}, recompute full) needs {memory / 1e9:,.0f} GB on a GPU, where a run can use "
            f"{limit / 1e9:,.0f} GB; use more or larger GPUs"
        )
    ranked = sorted(found.values(), key=lambda one: one.seconds)
    ways = (dataclasses.replace(one.load, layers=best_layers(one.load, limit)) for one in ranked[:UNEVEN])
    tried = [Estimate(way, constant) for way in ways]
    return tuple(sorted([*tried, *ranked[UNEVEN:]], key=lambda one: one.seconds))


def _ways(load: Workload) -> Iterator[tuple[StepSeconds, Workload]]:
    """All valid ways to run `load`, with a quick estimate of the step."""
    for one in _layouts(load):
        busy: dict[tuple[object, ...], StepSeconds] = {}  # steps without idle time, which depend on the stages only
        for variant in _variants(dataclasses.replace(load, layout=one)):
            for recompute in RECOMPUTE:
                way = dataclasses.replace(variant, recompute=recompute)
                places = way.placement
                key = places.num_stages, len(places.routes), way.micro_batch, recompute
                if key not in busy:
                    busy[key] = step_of(way, ALL - {"pipeline"})
                yield _with_idle_time(way, busy[key]), way


def _layouts(load: Workload) -> Iterator[Layout]:
    shape, gpus, cp = load.shape, load.layout.num_ranks, load.layout.cp
    experts = max(1, *(layer.experts for layer in shape.layers))
    for tp in [1 << i for i in range(min(load.device.domain.gpus or 1, gpus).bit_length())]:
        for one in layouts(gpus, len(shape.layers), experts):
            if one.dp % (tp * cp) == 0:
                yield dataclasses.replace(one, dp=one.dp // (tp * cp), tp=tp, cp=cp)


def _variants(load: Workload) -> Iterator[Workload]:
    """Schedules and micro-batches of a layout that can run, without recomputation."""
    one = load.layout
    schedules: list[tuple[str, int | None]] = [("1f1b", None)]
    if one.pp == 1 and one.ep > 1:
        schedules.append(("dualpipev", None))  # it overlaps on one rank, too
    if one.pp > 1:
        schedules = [(name, chunks) for name in NAMES for chunks in (CHUNKS if takes_chunks(name) else (None,))]
    for (name, chunks), size in itertools.product(schedules, MICRO_BATCHES):
        changed = dataclasses.replace(
            load, schedule=name, micro_batch=size, layout=dataclasses.replace(one, chunks=chunks)
        )
        try:
            changed.check()
            full_schedule(name, one.pp, changed.num_micro_batches, chunks)
        except ValueError:
            continue
        yield changed


def _with_idle_time(load: Workload, step: StepSeconds) -> StepSeconds:
    """`step` with the idle time of a pipeline with equal stages."""
    pp, n = load.layout.pp, load.num_micro_batches
    if pp == 1:
        return step
    long, slope, each = _makespans(load.schedule, pp, load.layout.chunks)
    factor = (long + (n - 6 * pp) * slope) / (n * each)  # relative to no idle time
    return dataclasses.replace(step, idle=(step.compute + step.exposed) * (factor - 1))


@functools.lru_cache(maxsize=1024)
def _makespans(schedule: str, pp: int, chunks: int | None) -> tuple[float, float, int]:
    """With equal stages: the time of 6 pp micro-batches, that of one more, and that of one alone on a rank."""
    short, long = (build(schedule, pp, count * pp, chunks) for count in (4, 6))
    times = [simulate(one, Costs(F=1, B=2, W=1)).makespan for one in (short, long)]
    return times[1], (times[1] - times[0]) / (2 * pp), 3 * long.num_stages // pp


REASONS = {
    "compute": "slower kernels", "exposed": "exposed expert transfers", "idle": "pipeline bubbles",
    "sums": "sums of gradients", "optimizer": "optimizer",
}  # fmt: skip


def why_slower(candidate: Estimate, best: Estimate) -> str:
    """The part of the step that adds most to the time of the best candidate, with its extra seconds."""
    if candidate is best:
        return ""
    factor = best.constant.factor
    more = {part: factor * (getattr(candidate.step, part) - getattr(best.step, part)) for part in REASONS}
    part = max(more, key=more.__getitem__)
    kinds = [RECOMPUTE.index(one.load.recompute) for one in (candidate, best)]
    recomputed = part == "compute" and kinds[0] > kinds[1]
    name = f"recomputation ({candidate.load.recompute})" if recomputed else REASONS[part]
    return f"{name} +{more[part]:.2f} s"
