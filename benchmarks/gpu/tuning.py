"""Trying configurations: each product by itself, checked before it is timed, the fastest ones in turns at the end.

N, K columns and length of the sum of a product, as in the tables.
"""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from moe_dualpipe.kernels.gpu import configs
from moe_dualpipe.kernels.gpu.configs import TileConfig, TunedKernel, override_config
from moe_dualpipe.kernels.gpu.device import arch_of

from .correctness import TOLERANCE
from .implementations import Problem
from .measure import Clock, Quartiles, error_summary, fill_free_memory_with_nan, single_phase, time_interleaved
from .precompile import NUM_TOKENS, run_commands
from .shapes import Shape
from .tuned_gemms import Gemm, candidate_configs, gemms, smoke_configs, with_other_group_m

MIN_SPEEDUP = 1.02  # a configuration that wins by less may have been lucky
NUM_FINALISTS = 3
NUM_PARTS = 4  # workers among which the configurations of one product are divided


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The fastest configuration of a product, its microseconds, and those of the one in use before."""

    config: TileConfig
    us: float
    before_us: float
    tried: int
    dropped: dict[str, str]


def tune_gemm(gemm: Gemm, device: torch.device, current: TileConfig, tried: Sequence[TileConfig]) -> TuningResult:
    """The fastest of `tried` that agrees, if it is clearly faster than `current` or that one does not work."""
    dropped: dict[str, str] = {}
    rough: dict[TileConfig, float] = {}

    def attempt(several: Sequence[TileConfig]) -> None:
        for config in several:
            if config not in rough and (us := quick_time_us(gemm, device, config, dropped)) is not None:
                rough[config] = us

    attempt([current, *tried])
    if not rough:
        raise ValueError(f"no configuration of {gemm} works on this GPU: {dropped}")
    attempt(with_other_group_m(min(rough, key=lambda config: rough[config])))
    best = sorted(rough, key=lambda config: rough[config])[:NUM_FINALISTS]
    us = final_times_us(gemm, device, {*best, current} & rough.keys())
    winner = min(us, key=lambda config: us[config])
    before = us.get(current, math.inf)
    if us[winner] * MIN_SPEEDUP > before:
        winner = current
    return TuningResult(winner, us[winner], before, len(tried), dropped)


def quick_time_us(gemm: Gemm, device: torch.device, config: TileConfig, dropped: dict[str, str]) -> float | None:
    """Microseconds of three launches' median; None, and why in `dropped`, for one that is wrong or does not run."""
    with override_config(gemm.kernel, config):
        try:
            fill_free_memory_with_nan(device, 4 * 2**30)
            error = gemm.error()
        except Exception as failure:  # too much shared memory, say
            dropped[str(config)] = error_summary(failure)
            return None
        if not error <= TOLERANCE[gemm.expected[0].dtype]:
            dropped[str(config)] = f"relative error {error:.2g}"
            return None
        repeats = 1 if device.type == "cpu" else 3
        times = time_interleaved(Clock(device), {"it": single_phase(gemm.launch)}, rounds=1, repeats=repeats)
    return 1e6 * Quartiles.of(times.seconds["it"][0]).median


def final_times_us(gemm: Gemm, device: torch.device, entrants: Collection[TileConfig]) -> dict[TileConfig, float]:
    """Microseconds of each, taken in turns."""

    def case(config: TileConfig) -> Callable[[], Any]:
        def run() -> None:
            with override_config(gemm.kernel, config):
                gemm.launch()

        return run

    named = {str(config): config for config in entrants}
    rounds, repeats = (1, 1) if device.type == "cpu" else (3, 5)
    cases = {name: single_phase(case(config)) for name, config in named.items()}
    times = time_interleaved(Clock(device), cases, rounds, repeats)
    return {named[name]: 1e6 * Quartiles.of(parts[0]).median for name, parts in times.seconds.items()}


# ---- A whole layer ----


def tune_shape(shape: Shape, device: torch.device, out: Path) -> None:
    """Tune every product of one layer; the table is written after each."""
    problem = make_problem(shape, device)
    element, arch = problem.x_ND.element_size(), arch_of(device)
    print(f"{shape} on {arch}", flush=True)
    if device.type == "cuda":
        precompile_gemms(shape)
    for gemm in gemms(problem):
        current = configs.lookup(gemm.kernel, arch, element, gemm.n, gemm.k)
        found = tune_gemm(gemm, device, current, configs_to_try(gemm.kernel, element, device))
        entry = configs.TunedKernel(gemm.kernel, arch, element, gemm.n, gemm.k, found.config)
        configs.save_table(out, merged_entries(out, entry), **gpu_and_versions(device))
        gain = f"{found.before_us:,.0f} -> {found.us:,.0f} us"
        print(f"  {gemm}: {gain} of {found.tried} tried, {len(found.dropped)} dropped: {found.config}", flush=True)


def make_problem(shape: Shape, device: torch.device) -> Problem:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter computes bf16 wrongly
    return Problem.random(shape, dtype, device)


def configs_to_try(kernel: str, element: int, device: torch.device) -> list[TileConfig]:
    if device.type == "cpu":
        return smoke_configs()
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    hopper_or_later = torch.version.hip is None and properties.major >= 9
    return candidate_configs(kernel, element, shared, hopper_or_later)


def merged_entries(path: Path, entry: TunedKernel) -> list[TunedKernel]:
    """What the table at `path` says already, with `entry` in the place of one for the same sizes."""

    def key(e: TunedKernel) -> tuple[Any, ...]:
        return e.kernel, e.arch, e.dtype_bytes, e.n, e.k

    others = configs.load_table(path) if path.exists() else ()
    return [*(other for other in others if key(other) != key(entry)), entry]


def gpu_and_versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return {"gpu": name, "versions": versions, "date": datetime.now(UTC).strftime("%Y-%m-%d")}


def precompile_gemms(shape: Shape) -> None:
    """Fill Triton's disk cache on all cores."""
    start = time.monotonic()
    sizes = ",".join(str(getattr(shape, name)) for name in "TDFEK")
    command = [sys.executable, "-m", "benchmarks.tune", "--shapes", sizes, "--worker"]
    commands = [[*command, str(i), str(part), str(NUM_PARTS)] for i in range(6) for part in range(NUM_PARTS)]
    unfinished = run_commands(commands, max(1, (os.cpu_count() or 2) - 1), 600)
    print(f"  compiled ahead in {time.monotonic() - start:.0f} s, {unfinished} parts left over", flush=True)


def compile_share(shape: Shape, device: torch.device, number: int, part: int, parts: int) -> None:
    """Launch product `number` once with every `parts`-th configuration, on few tokens."""
    problem = make_problem(dataclasses.replace(shape, T=NUM_TOKENS), device)
    gemm = list(gemms(problem))[number]
    for config in configs_to_try(gemm.kernel, problem.x_ND.element_size(), device)[part::parts]:
        try:
            with override_config(gemm.kernel, config):
                gemm.launch()
        except Exception as failure:  # found again, and reported, when it is timed
            sys.stderr.write(f"{gemm} {config}: {error_summary(failure)}\n")
