"""All ways to divide a model over some GPUs, ranked by predicted step time.

There are thousands. First, all are ranked by a quick estimate, which assumes that all stages take the same time. For
each division and schedule, only the fastest way that fits into memory is kept. The fastest of these are then simulated
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

from ...schedule import Costs
from .constants import find_constant
from .prediction import Estimate
from .segment_times import ALL
from .step import Step, step_of
from .workload import Division, Recompute, Workload
from .workload_memory import memory_of

SIMULATED = 40
"""How many candidates are simulated with the actual cost of each stage."""
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")
CHUNKS = (2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE: tuple[Recompute, ...] = ("none", "norms", "attention", "full")
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
    """ranked: all pairs of a division and a schedule that fit: first the simulated ones, then the others, each from
    fastest to slowest.

    too_large: divisions that do not fit in any way, with the GB of the smallest way. tried: how many ways were
    estimated.
    """

    ranked: tuple[Candidate, ...]
    too_large: tuple[tuple[Division, float], ...]
    tried: int
    software: str | None

    @property
    def best(self) -> Estimate:
        load = self.ranked[0].load
        return Estimate(load, find_constant(load.device.name, load.precision, self.software))


def search(load: Workload, software: str | None = None) -> Found:
    """Find the fastest way to run `load` on its number of GPUs, by varying division, schedule, micro-batch and
    recomputation.

    Raises ValueError for options that no division can run, and if nothing fits; the message names the smallest way.
    """
    one = Division(load.division.gpus, cp=load.division.cp)
    dataclasses.replace(load, division=one, micro_batch=1, global_batch=max(1, one.dp), schedule="1f1b").check()
    find_constant(load.device.name, load.precision, software, strict=True)
    limit = USABLE * load.device.memory_gb * 1e9
    ways = sorted(_ways(load), key=lambda pair: pair[0].seconds)
    groups: dict[tuple[Division, str], list[tuple[Step, Workload]]] = defaultdict(list)
    for step, way in ways:
        groups[_key(way), way.schedule].append((step, way))
    smallest: dict[Division, float] = {}
    found: list[Candidate] = []
    for (division, _), group in groups.items():
        memory, candidate = _fastest_that_fits(group, limit)
        smallest[division] = min(memory, smallest.get(division, math.inf))
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
    leanest: dict[int, float] = {}
    failed: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for _, way in sorted(group, key=lambda pair: _size(pair[1])):
        if way.division.vpp not in leanest:
            leanest[way.division.vpp] = memory_of(way).total
    for step, way in group:
        size, tight = _size(way), failed[way.division.vpp]
        # larger micro-batches and less recomputation do not fit either
        if leanest[way.division.vpp] > limit or any(size[0] >= a and size[1] >= b for a, b in tight):
            continue
        if (memory := memory_of(way).total) <= limit:
            return min(leanest.values()), Candidate(way, step, memory / 1e9)
        tight.append(size)
    return min(leanest.values()), None


def _size(load: Workload) -> tuple[int, int]:
    """The larger both numbers are, the more memory a division needs with a schedule."""
    return load.micro_batch, -RECOMPUTE.index(load.recompute)


def _key(load: Workload) -> Division:
    return dataclasses.replace(load.division, vpp=1)


def _ways(load: Workload) -> Iterator[tuple[Step, Workload]]:
    """All valid ways to run `load`, with a quick estimate of the step."""
    for one in _divisions(load):
        busy: dict[tuple[object, ...], Step] = {}  # steps without idle time, which depend on the stages only
        for variant in _variants(dataclasses.replace(load, division=one)):
            for recompute in RECOMPUTE:
                way = dataclasses.replace(variant, recompute=recompute)
                places = way.placement
                key = places.num_stages, len(places.routes), way.micro_batch, recompute
                if key not in busy:
                    busy[key] = step_of(way, ALL - {"pipeline"})
                yield _with_idle_time(way, busy[key]), way


def _divisions(load: Workload) -> Iterator[Division]:
    shape, device, gpus = load.shape, load.device, load.division.gpus
    experts = max(layer.experts for layer in shape.layers)
    for t in _powers(min(device.domain.gpus or 1, gpus)):
        for p in [p for p in range(1, min(gpus, len(shape.layers)) + 1) if gpus % p == 0]:
            if gpus % (t * p):
                continue
            for e in [e for e in range(1, experts + 1) if experts % e == 0] if experts else [1]:
                if gpus // p % e == 0:
                    yield Division(gpus, t, p, 1, e, load.division.cp)


def _variants(load: Workload) -> Iterator[Workload]:
    """Schedules and micro-batches of a division that can run, without recomputation."""
    one = load.division
    schedules: list[tuple[str, int]] = [("1f1b", 1)]
    if one.pp == 1 and one.ep > 1:
        schedules.append(("dualpipev", 1))  # it overlaps on one rank, too
    if one.pp > 1:
        schedules = [(name, 1) for name in SCHEDULES if name != "interleaved_1f1b"]
        schedules += [("interleaved_1f1b", chunks) for chunks in CHUNKS]
    for (name, chunks), size in itertools.product(schedules, MICRO_BATCHES):
        changed = dataclasses.replace(
            load, schedule=name, micro_batch=size, division=dataclasses.replace(one, vpp=chunks)
        )
        try:
            changed.check()
        except ValueError:
            continue
        yield changed


def _with_idle_time(load: Workload, step: Step) -> Step:
    """`step` with the idle time of a pipeline with equal stages."""
    if load.division.pp == 1:
        return step
    busy = step.compute + step.exposed
    return dataclasses.replace(step, idle=busy * (_idle_factor(load.schedule, load.division.pp, load.division.vpp,
                                                               load.num_micro_batches) - 1))  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _idle_factor(schedule: str, pp: int, vpp: int, num_micro_batches: int) -> float:
    """The step time of a pipeline with equal stages, relative to one without idle time."""
    short, long = (_makespan(schedule, pp, vpp, count * pp) for count in (4, 6))
    slope = (long - short) / (2 * pp)
    chunks = vpp if schedule == "interleaved_1f1b" else 2 if schedule in ("zbv", "dualpipev") else 1
    return (long + (num_micro_batches - 6 * pp) * slope) / (num_micro_batches * 3 * chunks)


@functools.lru_cache(maxsize=1024)
def _makespan(schedule: str, pp: int, vpp: int, num_micro_batches: int) -> float:
    from ...schedule import build, simulate

    chunks = vpp if schedule == "interleaved_1f1b" else None
    return simulate(build(schedule, pp, num_micro_batches, chunks), Costs(F=1, B=2, W=1)).makespan


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _nothing_fits(load: Workload, too_large: Sequence[tuple[Division, float]]) -> str:
    model = f"{load.shape.name} on {load.division.gpus} x {load.device.name}"
    if not too_large:
        return f"{model}: no division has whole micro-batches; change --gpus or --batch-size {load.global_batch}"
    division, memory = too_large[0]
    return (
        f"{model} does not fit: the smallest division ({division}, recompute full) needs {memory:.0f} of the "
        f"{USABLE * load.device.memory_gb:.0f} GB that a run can use on a GPU; use more GPUs, or GPUs with more memory"
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
