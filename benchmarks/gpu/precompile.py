"""Compile kernels ahead of the benchmark, on all CPU cores.

Triton compiles a kernel at its first launch, once per configuration and set of sizes, on one core; a library that
autotunes compiles hundreds. This would take most of the suite's time. But processes share Triton's disk cache. So
worker processes run each implementation once at each shape, with few tokens, before anything is timed. Workers compile
autotuned kernels without launching them, each worker a share of the configurations.

    python -m benchmarks.gpu.precompile liger 0 2 4      share 2 of 4 of Liger's configurations at the first shape

Autotuning still runs in the benchmark, but times each configuration with three launches instead of for 0.1 seconds.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from tempfile import TemporaryFile
from typing import Any

import torch

from .context import Context
from .implementations import AUTOTUNED, Problem, find_implementation, is_installed
from .measure import error_summary
from .shapes import SHAPES, TRAINING_SHAPE, Shape

NUM_SHARES = 4  # worker processes for the configurations of one autotuned implementation at one shape
NUM_TOKENS = 64
ALL_SHAPES = (*SHAPES, TRAINING_SHAPE)
Job = tuple[str, int, int, int]  # implementation, index into ALL_SHAPES, share, number of shares


def precompile(context: Context, shapes: Sequence[Shape]) -> None:
    """Fill Triton's cache for all implementations at `shapes`. Takes at most half of the section's remaining time."""
    jobs: list[Job] = []
    for index in [ALL_SHAPES.index(shape) for shape in (*shapes, TRAINING_SHAPE)]:
        for name in context.implementations:
            if name == "grouped_mm" or not is_installed(name):  # nothing to compile
                continue
            if name not in AUTOTUNED:
                jobs.append((name, index, 0, 1))
            elif index < context.tuning_shapes:
                jobs += [(name, index, share, NUM_SHARES) for share in range(NUM_SHARES)]
    start = time.monotonic()
    commands = [[sys.executable, "-m", "benchmarks.gpu.precompile", *map(str, job)] for job in jobs]
    ended = run_commands(commands, max(1, (os.cpu_count() or 2) - 1), 0.5 * context.seconds_left())
    unfinished = sum(code is None for code, _ in ended)
    context.log(f"precompiled {len(jobs) - unfinished} of {len(jobs)} jobs in {time.monotonic() - start:.0f} s")


def run_commands(commands: Sequence[Sequence[str]], workers: int, seconds: float) -> list[tuple[int | None, str]]:
    """Run commands, at most `workers` at a time. Returns the exit code and the output of each.

    The code is None for those that did not end within `seconds`.
    """
    end = time.monotonic() + seconds

    def run(command: Sequence[str]) -> tuple[int | None, str]:
        if (left := end - time.monotonic()) <= 0:
            return None, ""
        with TemporaryFile("w+") as output:  # a pipe would wait for processes that outlive the command
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            try:
                code = process.wait(left)
            except subprocess.TimeoutExpired:
                process.kill()
                code = None
            output.seek(0)
            return code, output.read()

    with ThreadPoolExecutor(workers) as pool:
        return [*pool.map(run, commands)]


# ---- Worker process ----


def main(arguments: Sequence[str]) -> None:
    name, index, share, num_shares = arguments[0], *map(int, arguments[1:])
    shape = dataclasses.replace(ALL_SHAPES[index], T=NUM_TOKENS)
    with compile_without_launching(share, num_shares):
        problem = Problem.random(shape, torch.bfloat16, torch.device("cuda"))
        implementation = find_implementation(name)(problem)
        implementation.gradients(implementation.forward(), problem.dy_ND)


@contextmanager
def compile_without_launching(share: int, num_shares: int) -> Iterator[None]:
    """In this context, autotuned kernels compile configurations share, share + num_shares, ... and do not launch."""
    from triton.runtime.autotuner import Autotuner

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        for config in self.configs[share::num_shares]:
            try:
                self.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
            except Exception as error:  # e.g. too much shared memory; the autotuner skips it later, too
                print(f"{self.base_fn.__name__} {config}: {error_summary(error)}", file=sys.stderr)

    with _patched(Autotuner, "run", compile_only):
        yield


@contextmanager
def quick_autotuning() -> Iterator[None]:
    """In this context, Triton autotuners take the median of three launches per configuration, after one untimed."""
    if not torch.cuda.is_available():
        yield
        return
    from triton.runtime.autotuner import Autotuner

    def bench(call: Callable[[], Any], **_quantiles: Any) -> list[float]:
        call()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        low, median, high = sorted(a.elapsed_time(b) for a, b in pairwise(marks))
        return [median, low, high]

    with _patched(Autotuner, "do_bench", staticmethod(bench)):
        yield


@contextmanager
def _patched(owner: type, name: str, value: Any) -> Iterator[None]:
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


if __name__ == "__main__":
    main(sys.argv[1:])
