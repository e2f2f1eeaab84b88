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

from .check import TOLERANCE
from .measure import Clock, Quartiles, once, poison, reason, take_turns
from .peers import Problem
from .precompile import TOKENS, work_off
from .shapes import Shape
from .tuned_products import Product, candidates, products, regrouped, smoke_candidates

CLEARLY = 1.02  # a configuration that wins by less may have been lucky
FINALISTS = 3
PARTS = 4  # workers among which the configurations of one product are divided


@dataclass(frozen=True, slots=True)
class Found:
    """The fastest configuration of a product, its microseconds, and those of the one in use before."""

    config: TileConfig
    us: float
    before_us: float
    tried: int
    dropped: dict[str, str]


def tune(product: Product, device: torch.device, current: TileConfig, tried: Sequence[TileConfig]) -> Found:
    """The fastest of `tried` that agrees, if it is clearly faster than `current` or that one does not work."""
    dropped: dict[str, str] = {}
    rough: dict[TileConfig, float] = {}

    def attempt(several: Sequence[TileConfig]) -> None:
        for config in several:
            if config not in rough and (us := quick_us(product, device, config, dropped)) is not None:
                rough[config] = us

    attempt([current, *tried])
    if not rough:
        raise ValueError(f"no configuration of {product} works on this GPU: {dropped}")
    attempt(regrouped(min(rough, key=lambda config: rough[config])))
    best = sorted(rough, key=lambda config: rough[config])[:FINALISTS]
    us = final(product, device, {*best, current} & rough.keys())
    winner = min(us, key=lambda config: us[config])
    before = us.get(current, math.inf)
    if us[winner] * CLEARLY > before:
        winner = current
    return Found(winner, us[winner], before, len(tried), dropped)


def quick_us(product: Product, device: torch.device, config: TileConfig, dropped: dict[str, str]) -> float | None:
    """Microseconds of three launches' median; None, and why in `dropped`, for one that is wrong or does not run."""
    with override_config(product.kernel, config):
        try:
            poison(device, 4 * 2**30)
            error = product.error()
        except Exception as failure:  # too much shared memory, say
            dropped[str(config)] = reason(failure)
            return None
        if not error <= TOLERANCE[product.expected[0].dtype]:
            dropped[str(config)] = f"relative error {error:.2g}"
            return None
        repeats = 1 if device.type == "cpu" else 3
        turns = take_turns(Clock(device), {"it": once(product.launch)}, rounds=1, repeats=repeats)
    return 1e6 * Quartiles.of(turns.seconds["it"][0]).median


def final(product: Product, device: torch.device, entrants: Collection[TileConfig]) -> dict[TileConfig, float]:
    """Microseconds of each, taken in turns."""

    def case(config: TileConfig) -> Callable[[], Any]:
        def run() -> None:
            with override_config(product.kernel, config):
                product.launch()

        return run

    named = {str(config): config for config in entrants}
    rounds, repeats = (1, 1) if device.type == "cpu" else (3, 5)
    cases = {name: once(case(config)) for name, config in named.items()}
    turns = take_turns(Clock(device), cases, rounds, repeats)
    return {named[name]: 1e6 * Quartiles.of(parts[0]).median for name, parts in turns.seconds.items()}


# ---- A whole layer ----


def tune_shape(shape: Shape, device: torch.device, out: Path) -> None:
    """Tune every product of one layer; the table is written after each."""
    problem = problem_of(shape, device)
    element, arch = problem.x_ND.element_size(), arch_of(device)
    print(f"{shape} on {arch}", flush=True)
    if device.type == "cuda":
        compile_ahead(shape)
    for product in products(problem):
        current = configs.lookup(product.kernel, arch, element, product.n, product.k)
        found = tune(product, device, current, to_try(product.kernel, element, device))
        entry = configs.TunedKernel(product.kernel, arch, element, product.n, product.k, found.config)
        configs.save_table(out, merged(out, entry), **about(device))
        gain = f"{found.before_us:,.0f} -> {found.us:,.0f} us"
        print(f"  {product}: {gain} of {found.tried} tried, {len(found.dropped)} dropped: {found.config}", flush=True)


def problem_of(shape: Shape, device: torch.device) -> Problem:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # the interpreter computes bf16 wrongly
    return Problem.random(shape, dtype, device)


def to_try(kernel: str, element: int, device: torch.device) -> list[TileConfig]:
    if device.type == "cpu":
        return smoke_candidates()
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block
    hopper_or_later = torch.version.hip is None and properties.major >= 9
    return candidates(kernel, element, shared, hopper_or_later)


def merged(path: Path, entry: TunedKernel) -> list[TunedKernel]:
    """What the table at `path` says already, with `entry` in the place of one for the same sizes."""

    def key(e: TunedKernel) -> tuple[Any, ...]:
        return e.kernel, e.arch, e.dtype_bytes, e.n, e.k

    others = configs.load_table(path) if path.exists() else ()
    return [*(other for other in others if key(other) != key(entry)), entry]


def about(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    versions = f"torch {torch.__version__}, triton {triton.__version__}"
    return {"gpu": name, "versions": versions, "date": datetime.now(UTC).strftime("%Y-%m-%d")}


def compile_ahead(shape: Shape) -> None:
    """Fill Triton's disk cache on all cores."""
    start = time.monotonic()
    sizes = ",".join(str(getattr(shape, name)) for name in "TDFEK")
    command = [sys.executable, "-m", "benchmarks.tune", "--shapes", sizes, "--worker"]
    commands = [[*command, str(i), str(part), str(PARTS)] for i in range(6) for part in range(PARTS)]
    left = work_off(commands, max(1, (os.cpu_count() or 2) - 1), 600)
    print(f"  compiled ahead in {time.monotonic() - start:.0f} s, {left} parts left over", flush=True)


def compile_part(shape: Shape, device: torch.device, number: int, part: int, parts: int) -> None:
    """Launch product `number` once with every `parts`-th configuration, on few tokens."""
    problem = problem_of(dataclasses.replace(shape, T=TOKENS), device)
    product = list(products(problem))[number]
    for config in to_try(product.kernel, problem.x_ND.element_size(), device)[part::parts]:
        try:
            with override_config(product.kernel, config):
                product.launch()
        except Exception as failure:  # found again, and reported, when it is timed
            sys.stderr.write(f"{product} {config}: {reason(failure)}\n")
