"""Compile kernels ahead of the benchmark, on all CPU cores.

Triton compiles a kernel at its first launch, once per configuration and set of sizes, on one core. This would take most
of the suite's time. But processes share Triton's disk cache. So worker processes run each implementation once at each
shape, with few tokens, before anything is timed.

    python -m benchmarks.gpu.precompile triton 2      the third shape
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from tempfile import TemporaryFile

import torch

from .context import Context
from .implementations import Problem, find_implementation
from .shapes import SHAPES, Shape

NUM_TOKENS = 64


def precompile(context: Context, shapes: Sequence[Shape]) -> None:
    """Fill Triton's cache for all implementations at `shapes`. Takes at most half of the section's remaining time."""
    names = [name for name in context.implementations if name != "grouped_mm"]
    worker = sys.executable, "-m", "benchmarks.gpu.precompile"
    commands = [(*worker, name, str(SHAPES.index(shape))) for shape in shapes for name in names]
    context.log(run_workers(commands, 0.5 * context.seconds_left()))


def run_workers(commands: Sequence[Sequence[str]], seconds: float) -> str:
    """Run commands that compile, on all CPU cores but one. Returns how many have succeeded."""
    start = time.monotonic()
    ended = run_commands(commands, max(1, (os.cpu_count() or 2) - 1), seconds)
    return f"precompiled {sum(code == 0 for code, _ in ended)} of {len(commands)} in {time.monotonic() - start:.0f} s"


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


def main(name: str, index: str) -> None:
    problem = Problem.random(
        dataclasses.replace(SHAPES[int(index)], T=NUM_TOKENS), torch.bfloat16, torch.device("cuda")
    )
    implementation = find_implementation(name)(problem)
    implementation.gradients(implementation.forward(), problem.dy_ND)


if __name__ == "__main__":
    main(*sys.argv[1:])
