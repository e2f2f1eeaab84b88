"""All divisions of a model over some GPUs that fit into memory, ranked by predicted step time.

There are thousands. All are first ranked by a quick estimate, which takes the idle time of a schedule from a pipeline
with equal stages; only the best are then simulated with their own stages.
"""

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..schedule import Costs
from .constants import find_constant
from .estimate import Estimate
from .memory_of_workload import memory_of
from .segments import ALL
from .step import Step, step_of
from .workload import Division, Recompute, Workload

SIMULATED = 24
"""How many candidates are simulated with their own stages."""
SCHEDULES = ("1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipe", "dualpipev")
CHUNKS = (2, 4, 8)
MICRO_BATCHES = (1, 2, 4, 8)
RECOMPUTE: tuple[Recompute, ...] = ("none", "norms", "attention", "full")
USABLE = 0.92
"""Share of a GPU's memory for the tensors of the run; the rest is for the context, libraries and fragments."""


@dataclass(frozen=True)
class Candidate:
    """A way to run that fits. step: without the measured constant. memory_gb: of the fullest rank."""

    load: Workload
    step: Step
    memory_gb: float

    @property
    def seconds(self) -> float:
        return self.step.seconds


@dataclass(frozen=True)
class Found:
    """ranked: the best first, each division with its best schedule, micro-batch and recomputation. too_large: the
    divisions for which nothing fits, with the memory of the best attempt. tried: how many ways were looked at."""

    ranked: tuple[Candidate, ...]
    too_large: tuple[tuple[Division, float], ...]
    tried: int
    software: str | None

    @property
    def best(self) -> Estimate:
        load = self.ranked[0].load
        return Estimate(load, find_constant(load.device.name, load.precision, self.software))


def search(load: Workload, software: str | None = None) -> Found:
    """Find how `load` runs best, on as many GPUs: its division, schedule, micro-batch and recomputation vary.

    Raises ValueError if nothing fits, with what comes nearest.
    """
    fits: list[Candidate] = []
    smallest: dict[Division, float] = {}
    tried = 0
    for one in _divisions(load):
        for variant in _variants(dataclasses.replace(load, division=one)):
            tried += 1
            candidate, memory = _try(variant)
            key = dataclasses.replace(variant.division, vpp=1)
            if candidate is None:
                smallest[key] = min(smallest.get(key, memory), memory)
            else:
                fits.append(candidate)
    if not fits:
        raise ValueError(_nothing_fits(load, smallest))
    fits.sort(key=lambda one: one.seconds)
    best = [dataclasses.replace(one, step=step_of(one.load)) for one in _first_of_each(fits)[:SIMULATED]]
    best.sort(key=lambda one: one.seconds)
    fitting = {dataclasses.replace(one.load.division, vpp=1) for one in fits}
    too_large = sorted(((d, memory) for d, memory in smallest.items() if d not in fitting), key=lambda pair: pair[1])
    return Found(tuple(best), tuple(too_large), tried, software)


def _first_of_each(fits: Sequence[Candidate]) -> list[Candidate]:
    """The best two schedules of each division: sorted candidates in, sorted candidates out."""
    seen: Counter[tuple[Division, str]] = Counter()
    divisions: Counter[Division] = Counter()
    chosen = []
    for one in fits:
        division, key = dataclasses.replace(one.load.division, vpp=1), (one.load.division, one.load.schedule)
        if not seen[key] and divisions[division] < 2:
            chosen.append(one)
        seen[key] += 1
        divisions[division] += seen[key] == 1
    return chosen


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


def _try(load: Workload) -> tuple[Candidate | None, float]:
    """The candidate with the least recomputation that fits, and the memory of the last one tried."""
    limit, memory = USABLE * load.device.memory_gb, 0.0
    for recompute in RECOMPUTE:
        changed = dataclasses.replace(load, recompute=recompute)
        memory = memory_of(changed).total / 1e9
        if memory <= limit:
            return Candidate(changed, quick_step(changed), memory), memory
    return None, memory


def quick_step(load: Workload) -> Step:
    """A step whose idle time is that of equal stages, stretched by the slowest rank."""
    step = step_of(load, ALL - {"pipeline"})
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
    from ..schedule import build, simulate

    chunks = vpp if schedule == "interleaved_1f1b" else None
    return simulate(build(schedule, pp, num_micro_batches, chunks), Costs(F=1, B=2, W=1)).makespan


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length()) if 1 << i <= most]


def _nothing_fits(load: Workload, smallest: dict[Division, float]) -> str:
    model = f"{load.shape.name} on {load.division.gpus} x {load.device.name}"
    if not smallest:
        return f"{model}: no division has whole micro-batches; change --gpus or --global-batch {load.global_batch}"
    division, memory = min(smallest.items(), key=lambda pair: pair[1])
    return (
        f"{model} does not fit: the smallest division ({division}, recompute full) needs {memory:.0f} GB of "
        f"{load.device.memory_gb:.0f} GB on a GPU; use more GPUs, or GPUs with more memory"
    )


REASONS = {
    "compute": "slower kernels", "exposed": "exposed expert transfers", "idle": "pipeline bubbles",
    "sums": "sums of gradients", "optimizer": "optimizer",
}  # fmt: skip


def why_slower(candidate: Candidate, best: Candidate) -> str:
    """The part of the step that costs the most more than in the best candidate."""
    if candidate is best:
        return ""
    more = {part: getattr(candidate.step, part) - getattr(best.step, part) for part in REASONS}
    part = max(more, key=more.__getitem__)
    recomputed = part == "compute" and candidate.load.recompute != best.load.recompute
    name = f"recomputation ({candidate.load.recompute})" if recomputed else REASONS[part]
    return f"{name} +{more[part]:.2f} s"
