"""Section "fp8": the products of a forward in FP8 beside those in 16 bits, and the kernel that rounds rows.

A product in FP8 is timed only if it agrees with plain torch on the same 8-bit numbers. Rounding reads a row in 16 bits
and writes it in 8; its rate is the bytes that move per second.
"""

from moe_dualpipe.kernels.fp8 import Fp8Recipe
from moe_dualpipe.kernels.gpu.fp8 import quantize_rows

from .context import Context, Operation
from .correctness import TOLERANCE
from .implementations import Problem
from .measure import excess, single_phase
from .shapes import MAIN_SHAPE, SHAPES, SMOKE_SHAPES, Shape
from .tuned_gemms import Gemm, gemms

NAMES = {"up": "up, with SwiGLU", "down": "down", "fp8": "in FP8"}


def run(context: Context) -> None:
    """Add the TFLOP/s of each product, and the GB/s of rounding."""
    if fault := Fp8Recipe().kernels_fault(context.device):
        context.log(f"skipped: FP8 {fault.partition(':')[0]}")
        return
    for shape in SMOKE_SHAPES if context.smoke else (MAIN_SHAPE, SHAPES[1]):
        measure_shape(context, shape)


def measure_shape(context: Context, shape: Shape) -> None:
    problem, recipe = Problem.random(shape, context.dtype, context.device), Fp8Recipe()
    products = [gemm for gemm in gemms(problem) if gemm.kernel in NAMES]
    operations = {title_of(gemm, shape): product(context, gemm, shape) for gemm in products}
    operations["round x"] = Operation(
        single_phase(lambda: quantize_rows(problem.x_ND, recipe.block, recipe.power_of_two)),
        {"": problem.x_ND.numel() * 3 / 1e9}, "GB/s",
    )  # fmt: skip
    context.compare(str(shape), operations)


def product(context: Context, gemm: Gemm, shape: Shape) -> Operation:
    flops = 2 * shape.rows * gemm.n * gemm.k * (1 + (gemm.kernel == "up"))
    return Operation(
        single_phase(gemm.launch), {"": flops / 1e12}, "TFLOP/s", lambda: excess(gemm.error(), TOLERANCE[context.dtype])
    )


def title_of(gemm: Gemm, shape: Shape) -> str:
    """Example: "up in FP8"."""
    which = "up" if (gemm.n, gemm.k) == (2 * shape.F, shape.D) else "down"
    return f"{which} {NAMES['fp8']}" if gemm.kernel == "fp8" else NAMES[gemm.kernel]
