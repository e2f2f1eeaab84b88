"""Clocks, turns and ceilings: how the GPU suite arrives at a number.

A GPU works behind the program's back, runs slower when it is warm, and faster on zeros. So time is taken by events on
the device, data is random, everything that is compared takes turns within one run, and what a number is compared with
(a dense matrix product, a copy) takes its turn among them. On a CPU, for trying the suite out, the clock on the wall
stands in for the events.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

BLOCK_NUMEL = 2**26  # numbers that are compared at a time

EndPhase = Callable[[], None]
Case = Callable[[EndPhase], None]  # does its work, and calls `lap` at the end of each part of it


@dataclass(frozen=True, slots=True)
class Quartiles:
    """Median, first and third quartile of `samples` measurements."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: list[float]) -> "Quartiles":
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


class Clock:
    """Marks in time: device events on a GPU, the clock on the wall elsewhere."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two marks, after `wait`."""
        return start.elapsed_time(end) / 1e3 if self.device.type == "cuda" else end - start

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass(slots=True)
class PhaseTimes:
    """What came of it: seconds[name][part][sample], and why a case was given up."""

    seconds: dict[str, list[list[float]]]
    failures: dict[str, str]


def time_interleaved(clock: Clock, cases: dict[str, Case], rounds: int, repeats: int) -> PhaseTimes:
    """Each case `repeats` times in a row, then the next one, and all of that `rounds` times.

    The call before the repeats of a turn is not counted: it fills the device's queue, so that the first counted one
    does not begin on an idle device. A case that raises loses its turns and is reported.
    """
    marks: dict[str, list[list[Any]]] = {name: [] for name in cases}
    failures: dict[str, str] = {}
    for _ in range(rounds):
        for name, case in cases.items():
            if name in failures:
                continue
            try:
                turn = [_run_and_mark(clock, case) for _ in range(repeats + 1)]
                clock.wait()
            except Exception as error:
                failures[name] = error_summary(error)
                continue
            marks[name] += turn[1:]
    seconds = {
        name: [list(part) for part in zip(*(_phase_seconds(clock, laps) for laps in taken), strict=True)]
        for name, taken in marks.items()
        if name not in failures
    }
    return PhaseTimes(seconds, failures)


def _run_and_mark(clock: Clock, case: Case) -> list[Any]:
    marks = [clock.mark()]
    case(lambda: marks.append(clock.mark()))
    return marks


def _phase_seconds(clock: Clock, marks: list[Any]) -> list[float]:
    return [clock.seconds(start, end) for start, end in pairwise(marks)]


def single_phase(run: Callable[[], Any]) -> Case:
    """A case of one part."""

    def case(end_phase: EndPhase) -> None:
        run()
        end_phase()

    return case


def error_summary(error: BaseException) -> str:
    """One line for a report."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


# ---- What is compared with ----


def dense_matmul(device: torch.device, smoke: bool) -> tuple[Callable[[], Tensor], int]:
    """A large square bf16 product on random data, and its operations."""
    size = 64 if smoke else 8192
    a, b = torch.randn(2, size, size, device=device).to(torch.bfloat16)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out), 2 * size**3


def device_copy(device: torch.device, smoke: bool) -> tuple[Callable[[], Tensor], int]:
    """A copy from device memory to device memory, and the bytes it reads and writes."""
    source = torch.empty((1 if smoke else 2048) * 2**20, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def measure_ceilings(clock: Clock, smoke: bool) -> dict[str, Any]:
    """{"dense": TFLOP/s, "copy": GB/s} of this device, each with quartiles."""
    gemm, flops = dense_matmul(clock.device, smoke)
    copy, num_bytes = device_copy(clock.device, smoke)
    rounds, repeats = (1, 2) if smoke else (3, 10)
    times = time_interleaved(clock, {"dense": single_phase(gemm), "copy": single_phase(copy)}, rounds, repeats)
    return {
        "dense": rate_statistics(times.seconds["dense"][0], flops / 1e12, "TFLOP/s"),
        "copy": rate_statistics(times.seconds["copy"][0], num_bytes / 1e9, "GB/s"),
    }


def rate_statistics(seconds: list[float], amount: float, unit: str) -> dict[str, Any]:
    """`amount` a second: median and quartiles of the rate, as a report keeps them."""
    q = Quartiles.of([amount / s for s in seconds])
    return {"unit": unit, "median": q.median, "low": q.low, "high": q.high, "samples": q.samples}


def microsecond_statistics(seconds: list[float]) -> dict[str, Any]:
    """Microseconds: median and quartiles, as a report keeps them."""
    return rate_statistics([1 / s for s in seconds], 1e6, "us")


# ---- Right before fast ----


def relative_error(found: Tensor, expected: Tensor) -> float:
    """|found - expected| / |expected| in fp64, as norms; NaN stays NaN. Piece by piece: fp64 copies would be large."""
    apart = size = torch.zeros((), dtype=torch.float64, device=expected.device)
    for f, e in zip(found.flatten().split(BLOCK_NUMEL), expected.flatten().split(BLOCK_NUMEL), strict=True):
        apart = apart + (f.double() - e.double()).square().sum()
        size = size + e.double().square().sum()
    return (apart / size).sqrt().item()


def fill_free_memory_with_nan(device: torch.device, num_bytes: int) -> None:
    """Fill memory that will be allocated next with NaN, so that what a kernel does not write shows.

    An output that was never written would else hold what the last contestant left there: the right numbers.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        torch.full((min(num_bytes, free // 2) // 4,), torch.nan, device=device)
