"""The GEMMs of an expert MLP that `benchmarks.tune` tunes, and the tile configurations it tries.

M rows in expert-major order, E experts, D model dim, F expert hidden size; N columns and K reduction size of a GEMM.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from moe_dualpipe.kernels.experts import swiglu
from moe_dualpipe.kernels.fp8 import Fp8Recipe
from moe_dualpipe.kernels.fp8_experts import PlainTorch
from moe_dualpipe.kernels.gpu.configs import TileConfig
from moe_dualpipe.kernels.gpu.fp8 import fp8_rows_times_weights
from moe_dualpipe.kernels.gpu.gemm import rows_times_weights
from moe_dualpipe.kernels.gpu.swiglu import swiglu_down_backward, swiglu_up
from moe_dualpipe.kernels.gpu.tiles import Tiling
from moe_dualpipe.kernels.gpu.wgrad import weight_gradients
from moe_dualpipe.kernels.grouped_gemm import grouped_mm, grouped_wgrad
from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.routing import expert_order

from .implementations import Problem
from .measure import relative_error

# ---- Candidates ----


def candidate_configs(kernel: str, element: int, shared_bytes: int, tma: bool, maxnreg: bool) -> list[TileConfig]:
    """Return configurations with 64 to 128 accumulators per thread whose pipeline stages fit in shared memory.

    tma, maxnreg: whether the GPU has these options. maxnreg makes room for a second block on a multiprocessor. It is
    tried where shared memory allows a second block, and the epilogue needs more registers than the product.
    """
    tiles = [(64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 64), (256, 128)]
    depths = ((32, 4), (32, 5), (64, 3), (64, 4))
    if kernel == "fp8":  # a tile of weights lies in a block of 128 x 128, which has one scale
        tiles, depths = [tile for tile in tiles if tile[1] <= 128], ((128, 2), (128, 3), (128, 4))
    found = []
    for block_m, block_n in tiles:
        for block_k, stages in depths:
            for warps in (4, 8):
                fits_registers = 64 <= block_m * block_n / (32 * warps) <= 128
                shared = stages * (block_m + block_n) * block_k * element
                if fits_registers and shared <= shared_bytes:
                    for through_tma in (False, True) if tma else (False,):
                        found.append(TileConfig(block_m, block_n, block_k, warps, stages, 8, through_tma))
                        fused = kernel in ("up", "down_backward") and (block_m, block_n) == (128, 128)
                        if maxnreg and fused and warps == 8 and 2 * shared <= shared_bytes:
                            found.append(dataclasses.replace(found[-1], maxnreg=128))
    return found


def with_other_orders(config: TileConfig) -> list[TileConfig]:
    """Return copies that compute the tiles in other orders: with another group_m or per_sm."""
    group_m = [dataclasses.replace(config, group_m=group_m) for group_m in (1, 4, 16) if group_m != config.group_m]
    return group_m + [dataclasses.replace(config, per_sm=per_sm) for per_sm in (None, 1, 2) if per_sm != config.per_sm]


SMOKE_TILES = ((16, 16, 16), (32, 32, 16))


def smoke_configs(kernel: str) -> list[TileConfig]:
    tiles = [(m, n, 128 if kernel == "fp8" else k) for m, n, k in SMOKE_TILES]
    return [TileConfig(*tile, warps=4, stages=1, group_m=8) for tile in tiles]


# ---- GEMMs ----


@dataclass(frozen=True, slots=True)
class Gemm:
    """One launch of `kernel` with N columns and reduction size K; `expected` is the result of plain torch.

    launch: returns tensors in the order of `expected`. Partial sums ([P, M] where `expected` is [M]) are added.
    """

    kernel: str
    n: int
    k: int
    launch: Callable[[], Sequence[Tensor | None]]
    expected: tuple[Tensor, ...]

    def __str__(self) -> str:
        return f"{self.kernel} n={self.n} k={self.k}"

    def error(self) -> float:
        """Launch once; return the largest relative error of the results, or NaN if any error is NaN."""
        found = [t for t in self.launch() if t is not None]
        whole = [f.sum(0) if f.ndim > e.ndim else f for f, e in zip(found, self.expected, strict=True)]
        errors = [relative_error(f, e) for f, e in zip(whole, self.expected, strict=True)]
        return max(errors) if all(error == error for error in errors) else float("nan")


def fp8_gemms(problem: Problem, order: ExpertOrder, num_sms: int | None) -> Iterator[Gemm]:
    """Yield the products of a forward in FP8, if the GPU can multiply in FP8."""
    shape, recipe = problem.shape, Fp8Recipe()
    if recipe.kernels_fault(problem.x_ND.device):
        return
    plain, tiling, dtype = PlainTorch(order, recipe), Tiling(order.expert_offsets, shape.rows), problem.x_ND.dtype
    x, index = recipe.quantize_rows(problem.x_ND), order.gather_idx_M
    h = plain.swiglu(plain.multiply(x, problem.gate_up, dtype, index), None)
    for rows, weights, of_rows in ((x, problem.gate_up, index), (h, problem.down, None)):
        w, expected = recipe.quantize_weights(weights), plain.multiply(rows, weights, dtype, of_rows)
        (n, k), launch = weights.shape[1:], partial(fp8_rows_times_weights, rows, w, tiling, dtype, of_rows, num_sms)
        yield Gemm("fp8", n, k, lambda launch=launch: (launch(),), (expected,))


def gemms(problem: Problem, num_sms: int | None = None) -> Iterator[Gemm]:
    """Yield the launches of one forward and backward, with inputs computed by plain torch. num_sms: None for all."""
    shape, x, dy, gate_up, down = problem.shape, problem.x_ND, problem.dy_ND, problem.gate_up, problem.down
    order = expert_order(problem.ids_NK, shape.E, shape.rows)
    index, choice, offsets = order.gather_idx_M, order.choice_idx_M, order.expert_offsets
    tiling, weights = Tiling(offsets, shape.rows), problem.weights_NK
    weight_M = weights.flatten()[choice, None]
    z = grouped_mm(x[index], gate_up, offsets, kernels="reference").requires_grad_()
    h = swiglu(z)
    dh = grouped_mm(dy[index], down, offsets, transposed=True, kernels="reference")
    (dz,) = torch.autograd.grad(h, z, (dh * weight_M).to(h.dtype))
    z, h = z.detach(), h.detach()
    weighted_h = (h * weight_M).to(h.dtype)

    yield Gemm(
        "up", shape.F, shape.D, lambda: swiglu_up(x, index, gate_up, tiling, None, choice, num_sms=num_sms), (z, h)
    )  # fmt: skip
    yield Gemm(
        "down", shape.D, shape.F, lambda: (rows_times_weights("down", h, down, tiling, num_sms=num_sms),),
        (grouped_mm(h, down, offsets, kernels="reference"),),
    )  # fmt: skip
    yield Gemm(
        "down_backward", shape.F, shape.D,
        lambda: swiglu_down_backward(dy, index, down, z, tiling, weights, choice, num_sms),
        (dz, weighted_h, (dh.float() * h.float()).sum(1)),
    )  # fmt: skip
    yield Gemm(
        "up_backward", shape.D, 2 * shape.F,
        lambda: (rows_times_weights("up_backward", dz, gate_up, tiling, True, num_sms=num_sms),),
        (grouped_mm(dz, gate_up, offsets, transposed=True, kernels="reference"),),
    )  # fmt: skip
    yield Gemm(
        "wgrad", shape.F, shape.D,
        lambda: (weight_gradients(dy, weighted_h, offsets, down.dtype, index, num_sms=num_sms),),
        (grouped_wgrad(dy[index], weighted_h, offsets, kernels="reference"),),
    )  # fmt: skip
    yield Gemm(
        "wgrad", shape.D, 2 * shape.F,
        lambda: (weight_gradients(dz, x, offsets, gate_up.dtype, None, index, num_sms=num_sms),),
        (grouped_wgrad(dz, x[index], offsets, kernels="reference"),),
    )  # fmt: skip
    yield from fp8_gemms(problem, order, num_sms)
