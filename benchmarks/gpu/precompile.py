"""Compiling ahead, on all cores: what a GPU suite would else spend most of its minutes on.

Triton compiles a kernel when it is first launched, for each configuration and set of sizes, on one core; a library that
tunes itself compiles hundreds. Its disk cache is shared by processes, though. So worker processes run every contestant
once at each shape, with few tokens, and an autotuned kernel is only compiled there, each worker taking its part of the
configurations. The suite then finds everything in the cache.

    python -m benchmarks.gpu.precompile liger 0 2 4      part 2 of 4 of Liger's configurations at the first shape

Autotuning itself is kept, but times each configuration three times instead of for a tenth of a second.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch

from .context import Context
from .implementations import AUTOTUNED, Problem, find_implementation, is_installed
from .measure import error_summary
from .shapes import SHAPES, TRAINING_SHAPE, Shape

NUM_PARTS = 4  # workers among which the configurations of one contestant at one shape are divided
NUM_TOKENS = 64
ALL_SHAPES = (*SHAPES, TRAINING_SHAPE)
Job = tuple[str, int, int, int]  # contestant, index into ALL_SHAPES, part, parts


def precompile(context: Context, shapes: Sequence[Shape]) -> None:
    """Fill Triton's cache for all contestants at `shapes`; at most half of the time that the section has left."""
    jobs: list[Job] = []
    for index in [ALL_SHAPES.index(shape) for shape in (*shapes, TRAINING_SHAPE)]:
        for name in context.implementations:
            if name == "grouped_mm" or not is_installed(name):  # nothing to compile
                continue
            if name not in AUTOTUNED:
                jobs.append((name, index, 0, 1))
            elif index < context.tuning_shapes:
                jobs += [(name, index, part, NUM_PARTS) for part in range(NUM_PARTS)]
    start = time.monotonic()
    commands = [[sys.executable, "-m", "benchmarks.gpu.precompile", *map(str, job)] for job in jobs]
    unfinished = run_commands(commands, max(1, (os.cpu_count() or 2) - 1), 0.5 * context.seconds_left())
    context.log(f"  compiled ahead in {time.monotonic() - start:.0f} s: {len(jobs) - unfinished} of {len(jobs)} jobs")


def run_commands(commands: Sequence[Sequence[str]], workers: int, seconds: float) -> int:
    """Run commands, so many at a time and quietly; how many were not begun or not finished in time."""
    waiting, running = list(commands), list[subprocess.Popen[bytes]]()
    end = time.monotonic() + seconds
    while (waiting or running) and time.monotonic() < end:
        running = [process for process in running if process.poll() is None]
        while waiting and len(running) < workers:
            running.append(subprocess.Popen(waiting.pop(0), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
        time.sleep(0.05)
    for process in running:
        process.kill()
        process.wait()
    return len(waiting) + len(running)


# ---- A worker ----


def main(arguments: Sequence[str]) -> None:
    name, index, part, parts = arguments[0], *map(int, arguments[1:])
    shape = dataclasses.replace(ALL_SHAPES[index], T=NUM_TOKENS)
    with compile_without_launching(part, parts):
        problem = Problem.random(shape, torch.bfloat16, torch.device("cuda"))
        implementation = find_implementation(name)(problem)
        implementation.gradients(implementation.forward(), problem.dy_ND)


@contextmanager
def compile_without_launching(part: int, parts: int) -> Iterator[None]:
    """Autotuned kernels are compiled, every `parts`-th configuration from `part` on, and not launched."""
    from triton.runtime.autotuner import Autotuner

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        for config in self.configs[part::parts]:
            try:
                self.fn.run(*args, **{**kwargs, **config.all_kwargs(), "warmup": True})
            except Exception as error:  # too much shared memory, say: the autotuner will find out, too
                print(f"{self.base_fn.__name__} {config}: {error_summary(error)}", file=sys.stderr)

    with _patched(Autotuner, "run", compile_only):
        yield


@contextmanager
def quick_autotuning() -> Iterator[None]:
    """Triton's autotuners time a configuration by the median of three launches, after one that is not counted."""
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
