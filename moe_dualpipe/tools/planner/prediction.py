"""Everything that is predicted of a training run before it starts: time, memory, cost, and why.

The step time of segments, links and pipeline is multiplied by one measured constant, which depends on the GPU, the
precision and the software (constants.py). It covers what a model of kernels does not know: the host, clocks under load,
slower ranks. `python -m benchmarks.planner` fits it to published runs, and prints the error on families that were left
out.
"""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...models.config import RECOMPUTE
from .constants import Constant, find_constant
from .peak import PeakMemory
from .segment_times import EFFECTS, layer_factors
from .step import Step, step_of
from .workload import Workload
from .workload_memory import memory_of

HOST_SECONDS = 9e-3
"""The host's time for the forward and the backward of a layer of experts without CUDA graphs: 8.8 to 9.7 ms in runs
of Qwen3-30B-A3B on H100 and B200 (NVIDIA-NeMo/Megatron-Bridge@067f987df docs/performance-summary-archive.md)."""


@dataclass(frozen=True)
class Estimate:
    """The prediction for a workload. constant: measured over predicted seconds of comparable runs, with an interval."""

    load: Workload
    constant: Constant

    @cached_property
    def step(self) -> Step:
        """The step of the model, without the constant."""
        return step_of(self.load)

    @property
    def seconds(self) -> float:
        return self.step.seconds * self.constant.factor

    @property
    def interval(self) -> tuple[float, float]:
        """The fastest and the slowest likely step, in seconds: 8 of 10 comparable runs should be in between."""
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
        """The load of the fullest rank of an expert group, divided by the mean: the mean over layers with experts."""
        factors = zip(layer_factors(self.load), self.load.shape.layers, strict=True)
        return statistics.fmean([factor for factor, layer in factors if layer.experts] or [1.0])

    @property
    def gpu_hours(self) -> float:
        """GPU hours of 10^12 tokens."""
        return 1e12 / self.tokens_per_gpu / 3600

    @cached_property
    def memory(self) -> PeakMemory:
        """The peak memory of the fullest rank."""
        return memory_of(self.load)

    def memory_advice(self) -> str:
        """Empty if the run fits into the memory of a GPU. Otherwise, the least recomputation with which it does."""
        load, limit = self.load, self.load.device.memory_gb * 1e9
        if self.memory.total <= limit:
            return ""
        for kind in RECOMPUTE[RECOMPUTE.index(load.recompute) + 1 :]:
            size = memory_of(replace(load, recompute=kind)).total
            if size <= limit:
                return f"It does not fit. With --recompute {kind}, it needs {size / 1e9:.1f} GB."
        return "It does not fit, even with --recompute full. moe-dualpipe plan search looks for a layout that does."

    def host_advice(self) -> str:
        """Empty unless layers are so short that the host may be slower than the GPU, which is not predicted."""
        load = self.load
        layers = sum(layer.experts > 0 for layer in load.shape.layers)
        each = self.seconds * load.layout.pp / (load.num_micro_batches * max(1, layers))
        if not layers or load.precision == "fp32" or each >= HOST_SECONDS:
            return ""
        return (
            f"A layer takes {1e3 * each:.1f} ms for a micro-batch. Published runs without CUDA graphs took "
            f"{1e3 * HOST_SECONDS:.0f} ms or more,\nbecause the host was slower than the GPU: "
            "use CUDA graphs or larger micro-batches."
        )

    def waterfall(self) -> Iterator[tuple[str, float]]:
        """What a step takes, from the ideal to the predicted time: names and seconds to add, in order."""
        yield "model FLOPs at the peak", ideal_seconds(self.load)
        on: frozenset[str] = frozenset()
        before = ideal_seconds(self.load)
        for effect in EFFECTS:
            on |= {effect}
            after = step_of(self.load, on).seconds
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


def ideal_seconds(load: Workload) -> float:
    """The time of a step whose model FLOPs run at the peak of the precision, with nothing else."""
    return load.tokens * load.shape.train_flops(load.seq) / (load.layout.num_ranks * load.peak)


def estimate(load: Workload, software: str | None = None) -> Estimate:
    """Predict a run. Raises ValueError, on one line, for a workload that cannot run."""
    load.check()
    return Estimate(load, find_constant(load.device.name, load.precision, software, strict=True))
