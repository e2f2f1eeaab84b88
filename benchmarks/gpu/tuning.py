"""Search for the fastest tile configuration of each GEMM of an expert MLP.

A configuration is timed only if its result is correct. The fastest few are then timed again, interleaved.
N columns and K reduction size of a GEMM, as in the tables of configurations.
"""

import dataclasses
import math
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import triton

from moe_dualpipe.kernels.gpu import configs
from moe_dualpipe.kernels.gpu.configs import TileConfig, TunedKernel, override_config
from moe_dualpipe.kernels.gpu.families import shared_memory_limit
from moe_dualpipe.kernels.gpu.launch_args import arch_of

from .correctness import TOLERANCE
from .implementations import Problem
from .measure import Clock, Quartiles, error_summary, excess, fill_free_memory_with_nan, single_phase, time_interleaved
from .precompile import NUM_TOKENS, run_workers
from .shapes import Shape
from .tuned_gemms import Gemm, candidate_configs, gemms, smoke_configs, with_other_orders

MIN_SPEEDUP = 1.02  # a smaller gain may be noise
NUM_FINALISTS = 3
NUM_SHARES = 4  # worker processes for the configurations of one GEMM


@dataclass(frozen=True, slots=True)
class TuningResult:
    """The chosen configuration of a GEMM, its microseconds, and those of the configuration in use before."""

    config: TileConfig
    us: float
    before_us: float
    tried: int
    dropped: dict[str, str]


def tune_gemm(gemm: Gemm, device: torch.device, current: TileConfig, tried: Sequence[TileConfig]) -> TuningResult:
    """Return the fastest correct configuration of `tried`, or `current` if that works and none is clearly faster."""
    dropped: dict[str, str] = {}
    quick_us: dict[TileConfig, float] = {}

    def attempt(several: Sequence[TileConfig]) -> None:
        for config in several:
            if config not in quick_us and (us := quick_time_us(gemm, device, config, dropped)) is not None:
                quick_us[config] = us

    attempt([current, *tried])
    if not quick_us:
        raise ValueError(f"no configuration of {gemm} works on this GPU: {dropped}")
    attempt(with_other_orders(min(quick_us, key=lambda config: quick_us[config])))
    best = sorted(quick_us, key=lambda config: quick_us[config])[:NUM_FINALISTS]
    us = times_us(gemm, device, {*best, current} & quick_us.keys(), 3, 5)
    winner = min(us, key=lambda config: us[config])
    before = us.get(current, math.inf)
    if us[winner] * MIN_SPEEDUP > before:
        winner = current
    return TuningResult(winner, us[winner], before, len(tried), dropped)


def quick_time_us(gemm: Gemm, device: torch.device, config: TileConfig, dropped: dict[str, str]) -> float | None:
    """Return the median microseconds of three launches; None, with the reason in `dropped`, if wrong or failing."""
    with override_config(gemm.kernel, config):
        try:
            fill_free_memory_with_nan(device, 4 * 2**30)
            fault = excess(gemm.error(), TOLERANCE[gemm.expected[0].dtype])
        except Exception as failure:  # for example, too much shared memory
            fault = error_summary(failure)
    if fault:
        dropped[str(config)] = fault
        return None
    return times_us(gemm, device, [config], 1, 3)[config]


def times_us(
    gemm: Gemm, device: torch.device, several: Collection[TileConfig], rounds: int, repeats: int
) -> dict[TileConfig, float]:
    """Return the median microseconds of each configuration, timed interleaved; on a CPU, once."""

    def case(config: TileConfig) -> Callable[[], Any]:
        def run() -> None:
            with override_config(gemm.kernel, config):
                gemm.launch()

        return run

    named = {str(config): config for config in several}
    rounds, repeats = (1, 1) if device.type == "cpu" else (rounds, repeats)
    cases = {name: single_phase(case(config)) for name, config in named.items()}
    seconds, _ = time_interleaved(Clock(device), cases, rounds, repeats)
    return {named[name]: 1e6 * Quartiles.of(phases[0]).median for name, phases in seconds.items()}


# ---- One layer ----


def tune_shape(shape: Shape, device: torch.device, out: Path, num_sms: int | None) -> None:
    """Tune every GEMM of one layer, and write the table to `out` after each. num_sms: of the GPU; None: all."""
    problem = make_problem(shape, device)
    arch, rows = arch_of(device), max(1, shape.rows // shape.E)
    print(f"{shape} on {num_sms or 'all'} SMs of {arch}", flush=True)
    if device.type == "cuda":
        precompile_gemms(shape)
    for gemm in gemms(problem, num_sms):
        element = element_of(gemm, problem)
        current = configs.lookup(gemm.kernel, arch, element, gemm.n, gemm.k, rows)
        tried = configs_to_try(gemm.kernel, element, device)
        found = tune_gemm(gemm, device, current, tried)
        entry = configs.TunedKernel(gemm.kernel, arch, element, gemm.n, gemm.k, found.config, rows)
        configs.save_table(out, merged_entries(out, entry), **gpu_and_versions(device))
        gain = f"{found.before_us:,.0f} -> {found.us:,.0f} us"
        print(f"  {gemm}: {gain} of {found.tried} tried, {len(found.dropped)} dropped: {found.config}", flush=True)


def element_of(gemm: Gemm, problem: Problem) -> int:
    """Bytes of a number that is multiplied."""
    return 1 if gemm.kernel == "fp8" else problem.x_ND.element_size()


def make_problem(shape: Shape, device: torch.device) -> Problem:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter computes bf16 incorrectly
    return Problem.random(shape, dtype, device)


def configs_to_try(kernel: str, element: int, device: torch.device) -> list[TileConfig]:
    if device.type == "cpu":
        return smoke_configs(kernel)
    nvidia = torch.version.hip is None
    hopper_or_later = nvidia and torch.cuda.get_device_capability(device)[0] >= 9
    return candidate_configs(kernel, element, shared_memory_limit(device), hopper_or_later, nvidia)


def merged_entries(path: Path, entry: TunedKernel) -> list[TunedKernel]:
    """Return the entries of the table at `path`, with `entry` replacing one for the same kernel, GPU and sizes."""

    def key(e: TunedKernel) -> tuple[Any, ...]:
        return e.kernel, e.arch, e.dtype_bytes, e.n, e.k, e.rows

    others = configs.load_table(path) if path.exists() else ()
    return [*(other for other in others if key(other) != key(entry)), entry]


def gpu_and_versions(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return {"gpu": name, "versions": versions, "date": datetime.now(UTC).strftime("%Y-%m-%d")}


def precompile_gemms(shape: Shape) -> None:
    """Fill Triton's disk cache, on all CPU cores."""
    sizes = ",".join(str(getattr(shape, name)) for name in "TDFEK")
    command = [sys.executable, "-m", "benchmarks.tune", "--shapes", sizes, "--worker"]
    commands = [[*command, str(i), str(share), str(NUM_SHARES)] for i in range(8) for share in range(NUM_SHARES)]
    print(f"  {run_workers(commands, 240)}", flush=True)


def compile_share(shape: Shape, device: torch.device, number: int, share: int, num_shares: int) -> None:
    """Launch GEMM `number` once on few tokens with configurations share, share + num_shares, ..."""
    problem = make_problem(dataclasses.replace(shape, T=NUM_TOKENS), device)
    for gemm in islice(gemms(problem), number, number + 1):  # none of those in FP8 on an older GPU
        for config in configs_to_try(gemm.kernel, element_of(gemm, problem), device)[share::num_shares]:
            try:
                with override_config(gemm.kernel, config):
                    gemm.launch()
            except Exception as failure:  # reported when it is timed
                sys.stderr.write(f"{gemm} {config}: {error_summary(failure)}\n")
