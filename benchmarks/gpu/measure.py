"""Timing for the GPU suite: clocks, interleaved measurements, and the operations that rates are compared with.

GPU launches are asynchronous, clock rates drop as the GPU warms up, and matmuls on zeros run faster than on real data.
Therefore times come from device events, inputs are random, and everything that is compared runs interleaved in one
process. So do the references that results are divided by: a dense matmul and a device-to-device copy.
On a CPU (smoke mode), `time.perf_counter` replaces the events.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

BLOCK_NUMEL = 2**26  # elements converted to fp64 at a time when tensors are compared

EndPhase = Callable[[], None]
Case = Callable[[EndPhase], None]  # runs the timed work; calls its argument at the end of each phase


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Median, first and third quartile of `samples` measurements."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: list[float]) -> "Quartiles":
        low, median, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
        return cls(median, low, high, len(values))


class Clock:
    """Timestamps: CUDA events on a GPU, `time.perf_counter` elsewhere."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two marks. Call `wait` first."""
        return start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def time_interleaved(
    clock: Clock, cases: dict[str, Case], rounds: int, repeats: int
) -> tuple[dict[str, list[list[float]]], dict[str, str]]:
    """Time all cases in turn, `repeats` times each, in each of `rounds` rounds.

    Returns seconds[name][phase][sample], and one error message for each case that raised.

    Each turn starts with one call that is not timed: it fills the device's queue, so that the first timed call does not
    start on an idle device. A case that raises is dropped and its error reported.
    """
    marks: dict[str, list[list[Any]]] = {name: [] for name in cases}
    failures: dict[str, str] = {}
    for _ in range(rounds):
        for name, case in cases.items():
            if name in failures:
                continue
            try:
                calls = [_run_and_mark(clock, case) for _ in range(repeats + 1)]
                clock.wait()
            except Exception as error:
                failures[name] = error_summary(error)
                continue
            marks[name] += calls[1:]
    seconds = {
        name: [list(phase) for phase in zip(*(_phase_seconds(clock, call) for call in calls), strict=True)]
        for name, calls in marks.items()
        if name not in failures
    }
    return seconds, failures


def _run_and_mark(clock: Clock, case: Case) -> list[Any]:
    marks = [clock.mark()]
    case(lambda: marks.append(clock.mark()))
    return marks


def _phase_seconds(clock: Clock, marks: list[Any]) -> list[float]:
    return [clock.seconds(start, end) for start, end in pairwise(marks)]


def single_phase(run: Callable[[], Any]) -> Case:
    """Return a case that times `run` as one phase."""

    def case(end_phase: EndPhase) -> None:
        run()
        end_phase()

    return case


def error_summary(error: BaseException) -> str:
    """Return the error's type and the first line of its message, at most 200 characters."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


# ---- What rates are compared with ----


def dense_matmul(device: torch.device, smoke: bool) -> tuple[Callable[[], Tensor], int]:
    """Return a large square bf16 matmul on random data, and its FLOPs."""
    size = 64 if smoke else 8192
    a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * size**3


def device_copy(device: torch.device, smoke: bool) -> tuple[Callable[[], Tensor], int]:
    """Return a device-to-device copy, and the bytes it reads and writes."""
    source = torch.empty((1 if smoke else 2048) * 2**20, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


# ---- Correctness before speed ----


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return |found - expected| / |expected| (2-norms, fp64). NaN if either has a NaN.

    Works block by block, because fp64 copies of whole tensors would take too much memory.
    """
    difference = size = torch.zeros((), dtype=torch.float64, device=expected.device)
    for f, e in zip(found.flatten().split(BLOCK_NUMEL), expected.flatten().split(BLOCK_NUMEL), strict=True):
        difference = difference + (f.double() - e.double()).square().sum()
        size = size + e.double().square().sum()
    return (difference / size).sqrt().item()


def excess(error: float, allowed: float) -> str:
    """Describe a relative error that is not allowed; "" if it is. NaN is above any tolerance."""
    return "" if error <= allowed else f"relative error {error:.2g}"


def fill_free_memory_with_nan(device: torch.device, num_bytes: int) -> None:
    """Write NaN into up to `num_bytes` of free GPU memory, so that an output that a kernel leaves unwritten is NaN.

    Otherwise such an output could still hold the correct values of the previous implementation.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        torch.full((min(num_bytes, free // 2) // 4,), torch.nan, device=device)
