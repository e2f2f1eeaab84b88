"""Section "fp8": the products of a forward in FP8 beside those in 16 bits, and the kernel that rounds rows.

A product in FP8 is timed only if it agrees with plain torch on the same 8-bit numbers. Rounding reads a row in 16 bits
and writes it in 8; its rate is the bytes that move per second.
"""

from typing import Any

from moe_dualpipe.kernels.fp8 import Fp8Recipe
from moe_dualpipe.kernels.gpu.fp8 import quantize_rows

from .context import Context
from .correctness import TOLERANCE
from .implementations import Problem
from .measure import rate_statistics, single_phase, time_interleaved
from .shapes import GOAL_SHAPE, SHAPES, SMOKE_SHAPES, Shape
from .tuned_gemms import Gemm, gemms

NAMES = {"up": "up, with SwiGLU", "down": "down", "fp8": "in FP8"}


def run(context: Context, record: dict[str, Any]) -> None:
    """Fill record["shapes"]: TFLOP/s of each product, and GB/s of rounding."""
    if fault := Fp8Recipe().kernels_fault(context.device):
        record.update(status="skipped", reason=f"skipped: FP8 {fault.partition(':')[0]}")
        return
    record["shapes"] = []
    for shape in SMOKE_SHAPES if context.smoke else (GOAL_SHAPE, SHAPES[1]):
        entry = {"shape": {name: getattr(shape, name) for name in "TDFEK"}, **measure_shape(context, shape)}
        record["shapes"].append(entry)
        context.save()


def measure_shape(context: Context, shape: Shape) -> dict[str, Any]:
    problem, recipe = Problem.random(shape, context.dtype, context.device), Fp8Recipe()
    products = {title_of(gemm, shape): gemm for gemm in gemms(problem) if gemm.kernel in NAMES}
    errors = {name: gemm.error() for name, gemm in products.items()}
    found: dict[str, Any] = {
        name: {"status": "wrong", "error": error}
        for name, error in errors.items()
        if not error <= TOLERANCE[context.dtype]
    }
    cases = {name: single_phase(gemm.launch) for name, gemm in products.items() if name not in found}
    cases["round x"] = single_phase(lambda: quantize_rows(problem.x_ND, recipe.block, recipe.power_of_two))
    times = time_interleaved(context.clock, cases, *context.rounds_and_repeats)
    found |= {name: {"status": "failed", "reason": reason} for name, reason in times.failures.items()}
    flops = {name: 2 * shape.rows * gemm.n * gemm.k * (1 + (gemm.kernel == "up")) for name, gemm in products.items()}
    for name, (seconds,) in times.seconds.items():
        amount, unit = (flops[name] / 1e12, "TFLOP/s") if name in flops else (problem.x_ND.numel() * 3 / 1e9, "GB/s")
        found[name] = {"status": "timed", **rate_statistics(seconds, amount, unit)}
    return {"rates": found}


def title_of(gemm: Gemm, shape: Shape) -> str:
    """Example: "up in FP8"."""
    which = "up" if (gemm.n, gemm.k) == (2 * shape.F, shape.D) else "down"
    return f"{which} {NAMES['fp8']}" if gemm.kernel == "fp8" else NAMES[gemm.kernel]
