"""All ways to divide a model over some GPUs, ranked by predicted step time.

There are thousands. First, all are ranked by a quick estimate, which assumes that all stages take the same time. For
each layout and schedule, only the fastest way that fits into memory is kept. The fastest of these are then simulated
with the actual cost of each stage.
"""

import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ...models.config import RECOMPUTE
from ...runtime.layout import Layout, layouts
from ...schedule import Costs, build, simulate
from .constants import find_constant
from .prediction import Estimate
from .segment_times import ALL
from .step import Step, step_of
from .workload import Workload, layout_of, layout_text
from .workload_memory import memory_of

SIMULATED = 40
"""How many candidates are simulated with the actual cost of each stage."""
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")
CHUNKS = (2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8)
USABLE = 0.92
"""Share of a GPU's memory for the tensors of the run; the rest is for the CUDA context, libraries and fragmentation."""


@dataclass(frozen=True)
class Candidate:
    """A way to run that fits. step: without the measured constant. memory_gb: of the fullest rank.

    simulated: `step` is simulated with the actual cost of each stage. Otherwise, it is a quick estimate with equal
    stages.
    """

    load: Workload
    step: Step
    memory_gb: float
    simulated: bool = False

    @property
    def seconds(self) -> float:
        return self.step.seconds


@dataclass(frozen=True)
class Found:
    """ranked: all pairs of a layout and a schedule that fit: first the simulated ones, then the others, each from
    fastest to slowest.

    too_large: layouts that do not fit in any way, with the GB of the smallest way. tried: how many ways were
    estimated.
    """

    ranked: tuple[Candidate, ...]
    too_large: tuple[tuple[Layout, float], ...]
    tried: int
    software: str | None

    @property
    def best(self) -> Estimate:
        load = self.ranked[0].load
        return Estimate(load, find_constant(load.device.name, load.precision, self.software))


def check_searched(load: Workload) -> None:
    """Raise ValueError unless there is a way to run `load`, whatever memory it needs."""
    one = layout_of(load.layout.num_ranks, cp=load.layout.cp)
    dataclasses.replace(load, layout=one, micro_batch=1, global_batch=max(1, one.dp), schedule="1f1b").check()
    if not any(True for layout in _layouts(load) for _ in _variants(dataclasses.replace(load, layout=layout))):
        batch = f"--batch-size {load.global_batch}"
        raise ValueError(f"{batch} cannot be divided into whole micro-batches in any layout of --gpus {one.num_ranks}")


def search(load: Workload, software: str | None = None) -> Found:
    """Find the fastest way to run `load` on its number of GPUs, by varying layout, schedule, micro-batch and
    recomputation.

    Raises ValueError for options that no layout can run, and if nothing fits; the message names the smallest way.
    """
    check_searched(load)
    find_constant(load.device.name, load.precision, software, strict=True)
    limit = USABLE * load.device.memory_gb * 1e9
    ways = sorted(_ways(load), key=lambda pair: pair[0].seconds)
    groups: dict[tuple[Layout, str], list[tuple[Step, Workload]]] = defaultdict(list)
    for step, way in ways:
        groups[dataclasses.replace(way.layout, chunks=None), way.schedule].append((step, way))
    smallest: dict[Layout, float] = {}
    found: list[Candidate] = []
    for (layout, _), group in groups.items():
        memory, candidate = _fastest_that_fits(group, limit)
        smallest[layout] = min(memory, smallest.get(layout, math.inf))
        found += [] if candidate is None else [candidate]
    too_large = sorted(((one, size / 1e9) for one, size in smallest.items() if size > limit), key=itemgetter(1))
    if not found:
        raise ValueError(_nothing_fits(load, too_large))
    found.sort(key=lambda one: one.seconds)
    exact = [dataclasses.replace(one, step=step_of(one.load), simulated=True) for one in found[:SIMULATED]]
    exact.sort(key=lambda one: one.seconds)
    return Found((*exact, *found[SIMULATED:]), tuple(too_large), len(ways), software)


def _fastest_that_fits(group: Sequence[tuple[Step, Workload]], limit: float) -> tuple[float, Candidate | None]:
    """The bytes of the smallest way of a group, and the fastest way that fits. The group is sorted, fastest first."""
    leanest: dict[int | None, float] = {}
    failed: dict[int | None, list[tuple[int, int]]] = defaultdict(list)
    for _, way in sorted(group, key=lambda pair: _size(pair[1])):
        if way.layout.chunks not in leanest:
            leanest[way.layout.chunks] = memory_of(way).total
    for step, way in group:
        size, tight = _size(way), failed[way.layout.chunks]
        # larger micro-batches and less recomputation do not fit either
        if leanest[way.layout.chunks] > limit or any(size[0] >= a and size[1] >= b for a, b in tight):
            continue
        if (memory := memory_of(way).total) <= limit:
            return min(leanest.values()), Candidate(way, step, memory / 1e9)
        tight.append(size)
    return min(leanest.values()), None


def _size(load: Workload) -> tuple[int, int]:
    """The larger both numbers are, the more memory a layout needs with a schedule."""
    return load.micro_batch, -RECOMPUTE.index(load.recompute)


def _ways(load: Workload) -> Iterator[tuple[Step, Workload]]:
    """All valid ways to run `load`, with a quick estimate of the step."""
    for one in _layouts(load):
        busy: dict[tuple[object, ...], Step] = {}  # steps without idle time, which depend on the stages only
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
        schedules = [(name, None) for name in SCHEDULES if name != "interleaved_1f1b"]
        schedules += [("interleaved_1f1b", chunks) for chunks in CHUNKS]
    for (name, chunks), size in itertools.product(schedules, MICRO_BATCHES):
        changed = dataclasses.replace(
            load, schedule=name, micro_batch=size, layout=dataclasses.replace(one, chunks=chunks)
        )
        try:
            changed.check()
        except ValueError:
            continue
        yield changed


def _with_idle_time(load: Workload, step: Step) -> Step:
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


def _nothing_fits(load: Workload, too_large: Sequence[tuple[Layout, float]]) -> str:
    model = f"{load.shape.name} on {load.layout.num_ranks} x {load.device.name}"
    layout, memory = too_large[0]
    return (
        f"{model} does not fit: the smallest layout ({layout_text(layout)}, recompute full) needs {memory:,.0f} GB "
        f"on a GPU, where a run can use {USABLE * load.device.memory_gb:,.0f} GB; use more or larger GPUs"
    )


REASONS = {
    "compute": "slower kernels", "exposed": "exposed expert transfers", "idle": "pipeline bubbles",
    "sums": "sums of gradients", "optimizer": "optimizer",
}  # fmt: skip


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """The part of the step that adds most to the time of the best candidate, with its extra seconds."""
    if candidate is best:
        return ""
    more = {part: getattr(candidate.step, part) - getattr(best.step, part) for part in REASONS}
    part = max(more, key=more.__getitem__)
    kinds = [RECOMPUTE.index(one.load.recompute) for one in (candidate, best)]
    recomputed = part == "compute" and kinds[0] > kinds[1]
    name = f"recomputation ({candidate.load.recompute})" if recomputed else REASONS[part]
    return f"{name} +{more[part]:.2f} s"
