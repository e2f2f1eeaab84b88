"""Everything that is predicted of a training run before it starts: time, memory, cost, and why.

The step time of segments, links and pipeline is multiplied by one constant from published runs (constants.py). It
covers effects that are not modeled: clocks under load, kernels of a family of models, slower ranks. A measured step
replaces the constant.
"""

import math
import statistics
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...expert_parallel.placement import place_experts
from ...messages import plural
from ...models.config import RECOMPUTE
from ...pipeline.peak_memory import PeakMemory
from .constants import Constant, find_constant
from .routing import VIOLATION
from .segment_times import EFFECTS, layer_factors
from .stages import memory_of
from .step import StepSeconds, step_of
from .workload import Workload

MEMORY_ERROR = 0.1
"""Share by which memory may be mispredicted: published peaks are within it (tests/tools/planner/test_peak.py)."""
REPEATED = math.log(1.06)
"""Published results for the same configuration differ by 6% (median)."""
CHANGES: dict[str, dict[str, Any]] = {
    "the CPU launches every kernel (--cuda-graphs none)": {"cuda_graphs": "none"},
    "CUDA graphs replay whole steps (--cuda-graphs full)": {"cuda_graphs": "full"},
    "tokens travel once per expert (--ep-backend all_to_all)": {"ep_backend": "all_to_all"},
    "tokens travel once per GPU or domain (--ep-backend deepep)": {"ep_backend": "deepep"},
    "no transfers of experts are hidden (--no-overlap)": {"overlap": False},
    "transfers of experts are hidden (--overlap)": {"overlap": True},
    "attention is FlashAttention-2 (--attention flash2)": {"attention": "flash2"},
    "attention writes its scores to memory (--attention plain)": {"attention": "plain"},
    "attention is the fastest kernel (--attention fastest)": {"attention": "fastest"},
    f"experts get uneven numbers of tokens (--max-vio {VIOLATION})": {"violation": VIOLATION},
    "experts get equal numbers of tokens (--max-vio 0)": {"violation": 0.0},
    "whole blocks are computed again (--recompute full)": {"recompute": "full"},
    "nothing is computed again (--recompute none)": {"recompute": "none"},
    "each GPU updates all parameters (--no-zero)": {"zero": False},
}
"""Possible causes if a run is slower or faster than predicted: a text, and the options of the workload."""


@dataclass(frozen=True)
class Estimate:
    """The prediction for a workload. constant: measured over predicted seconds of comparable runs, with an interval."""

    load: Workload
    constant: Constant

    @cached_property
    def step(self) -> StepSeconds:
        """The step of the model, without the constant."""
        return step_of(self.load)

    @property
    def seconds(self) -> float:
        return self.step.seconds * self.constant.factor

    @property
    def interval(self) -> tuple[float, float]:
        """The fastest and the slowest likely step, in seconds: 9 of 10 comparable runs should be in between."""
        return self.step.seconds * self.constant.low, self.step.seconds * self.constant.high

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and GPU."""
        return self.load.tokens / self.seconds / self.load.layout.num_ranks

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of a GPU: recomputation does not count."""
        return self.tokens_per_gpu * self.load.shape.train_flops(self.load.seq)

    @property
    def utilization(self) -> float:
        """Model FLOPs utilization (MFU), of the peak in the precision of the run."""
        return self.flops_per_gpu / self.load.peak

    @property
    def imbalance(self) -> float:
        """The largest load of a rank of an expert group divided by the mean, as a mean over layers with experts."""
        factors = zip(layer_factors(self.load), self.load.shape.layers, strict=True)
        return statistics.fmean([factor for factor, layer in factors if layer.experts] or [1.0])

    @property
    def gpu_hours(self) -> float:
        """GPU hours of 10^12 tokens."""
        return 1e12 / self.tokens_per_gpu / 3600

    @cached_property
    def memory(self) -> PeakMemory:
        """The peak memory of the rank that needs the most."""
        return memory_of(self.load)

    def memory_advice(self) -> str:
        """Empty if the run certainly fits into a GPU. Otherwise, the least recomputation with which it fits."""
        load, limit, total = self.load, self.load.device.memory_gb * 1e9, self.memory.total
        if total * (1 + MEMORY_ERROR) <= limit:
            return ""
        if total <= limit * (1 + MEMORY_ERROR):
            return f"It may not fit: the prediction of memory is within {MEMORY_ERROR:.0%}."
        for kind in RECOMPUTE[RECOMPUTE.index(load.recompute) + 1 :]:
            size = memory_of(replace(load, recompute=kind)).total
            if size <= limit:
                return (
                    f"It does not fit with --recompute {load.recompute}. With --recompute {kind}, it needs "
                    f"{size / 1e9:.1f} GB;\nruns that recompute other parts of a block are in between."
                )
        return "It does not fit, even with --recompute full. moe-dualpipe plan search looks for a layout that does."

    def measured(self, seconds: float) -> "Estimate":
        """This estimate, with the constant that a measured step of this run implies."""
        factor = seconds / self.step.seconds
        low, high = factor / math.exp(REPEATED), factor * math.exp(REPEATED)
        return replace(self, constant=replace(self.constant, factor=factor, low=low, high=high))

    def differences(self, slower: bool) -> list[tuple[str, float]]:
        """Changes that would make this run slower, or faster, and the seconds they add to a step, largest first."""
        before, found = find_constant(self.load).factor, []
        for what, change in CHANGES.items():
            load = replace(self.load, **change)
            factor = self.constant.factor * find_constant(load).factor / before
            more = step_of(load).seconds * factor - self.seconds
            if abs(more) > 0.01 * self.seconds and (more > 0) == slower:
                found.append((what, more))
        return sorted(found, key=lambda one: -abs(one[1]))

    def waterfall(self) -> Iterator[tuple[str, float]]:
        """What a step takes, from the ideal to the predicted time: names and seconds to add, in order."""
        before = ideal_seconds(self.load)
        yield "model FLOPs at the peak", before
        for number, effect in enumerate(EFFECTS, 1):
            after = step_of(self.load, EFFECTS[:number]).seconds
            yield effect, after - before
            before = after
        yield "software", self.seconds - before

    def as_dict(self) -> dict[str, Any]:
        """The JSON report."""
        low, high = self.interval
        return {
            "step_time_s": self.seconds, "step_time_low_s": low, "step_time_high_s": high,
            "tokens_per_s_per_gpu": self.tokens_per_gpu, "model_tflops_per_gpu": self.flops_per_gpu / 1e12,
            "mfu": self.utilization, "hidden_fraction": self.step.hidden, "bubble_fraction": self.step.bubble,
            "gpu_hours_per_trillion_tokens": self.gpu_hours, "peak_memory_gb": self.memory.total / 1e9,
            "memory_gb": {name: size / 1e9 for name, size in self.memory.parts().items()},
            "expert_imbalance": self.imbalance, "waterfall_s": dict(self.waterfall()),
        }  # fmt: skip


def routings(load: Workload) -> Iterator[tuple[str, Workload]]:
    """The run with its experts in other places, over other numbers of ranks, and with other limits of the router."""
    shape, one, domain = load.shape, load.layout, load.device.domain.gpus or load.layout.ep
    nodes, groups = max(1, one.ep // domain), max(layer.groups for layer in shape.layers)
    yield "as given", load
    if load.loads:
        number = len(load.loads.loads[0])
        for more, name in enumerate(("moved", "moved, with 1 copy on each GPU", "moved, with 2 copies on each GPU")):
            experts = place_experts(load.loads.loads, number + more * one.ep, one.ep, nodes, groups)
            yield name, replace(load, experts=experts)
    for ep in (one.ep // 2, 2 * one.ep):
        other = replace(load, layout=replace(one, ep=ep), experts=None)
        with suppress(ValueError):
            other.check()
            yield f"in order, --ep {ep}", other
    if nodes > 1 and load.ep_backend != "all_to_all":
        limit = (1, 1) if groups > 1 else (nodes, nodes // 2)
        layers = tuple(replace(layer, groups=limit[0], top_groups=limit[1]) for layer in shape.layers)
        name = "tokens go to any node" if groups > 1 else f"tokens go to at most {plural(nodes // 2, 'node')}"
        yield name, replace(load, shape=replace(shape, layers=layers))
    yield "all experts alike", replace(load, loads=None, experts=None, violation=0.0)


def ideal_seconds(load: Workload) -> float:
    """The time of a step whose model FLOPs run at the peak of the precision, with nothing else."""
    return load.tokens * load.shape.train_flops(load.seq) / (load.layout.num_ranks * load.peak)


def estimate(load: Workload, software: str | None = None) -> Estimate:
    """Predict a run. Raises ValueError, on one line, for a workload that cannot run."""
    load.check()
    return Estimate(load, find_constant(load, software, strict=True))
