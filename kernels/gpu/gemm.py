"""Grouped products in Triton: the rows of each expert times the weights of that expert.

    y[m] = W[e] a[m], or W[e]^T a[m], for the rows m of expert e          forward and input gradients

Rows are read through an index if one is given, so no sorted copy of the tokens is made. Products that are fused with
SwiGLU are in swiglu.py, weight gradients in wgrad.py, and shared parts in tiles.py. The products are those of SonicMoE
(arXiv 2512.14080), but without atomics.

M rows in expert-major order, E experts, N columns of a product, K length of the sum.
"""

import triton
import triton.language as tl
from torch import Tensor

from .configs import lookup
from .launch_args import arch_of, launch_grid, launch_settings, weights_argument
from .tiles import Tiling, locate_tile, split_columns, store_tile, tile_product, tile_rows


@triton.jit(do_not_specialize=["slots"])
def rows_times_weights_kernel(
    a, index, w, out, tiles, offsets, slots, STRIDE_A: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TRANSPOSED: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in range(tl.program_id(0), slots * TILES_N, tl.num_programs(0)):
        e, first, end, n_tile = locate_tile(tile, tiles, offsets, slots, TILES_N, GROUP_M)
        if e >= 0:
            a_rows = a + tile_rows(index, first, end, GATHER, BLOCK_M) * STRIDE_A
            n0 = n_tile * BLOCK_N
            acc = tile_product(a_rows, w, e, n0, N, K, TRANSPOSED, False, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
            m = first + tl.arange(0, BLOCK_M)
            left, right = split_columns(acc, BLOCK_M, BLOCK_N)
            store_tile(out, left, m, n0, end, N, N, BLOCK_N // 2, BLOCK_N)
            store_tile(out, right, m, n0 + BLOCK_N // 2, end, N, N, BLOCK_N // 2, BLOCK_N)


def rows_times_weights(
    kernel: str, a: Tensor, w: Tensor, tiling: Tiling, transposed: bool = False, index: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:  # fmt: skip
    """Return y [M, N] with y[m] = W[e] a[m] for w [E, N, K], or W[e]^T a[m] for w [E, K, N] if `transposed`.

    a: [M, K], or [., K] with index [M], the row of a for each m. kernel: the name to look up tile sizes (configs.py).
    """
    n, k = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    config = lookup(kernel, arch_of(a.device), a.element_size(), n, k)
    box = (1, config.block_k, config.block_n) if transposed else (1, config.block_n, config.block_k)
    out = a.new_empty(tiling.num_rows, n)
    if tiling.num_rows:
        tiles = tiling(config.block_m)
        rows_times_weights_kernel[launch_grid(len(tiles), n, config.block_n, num_sms)](
            a, index, weights_argument(w, box, config), out, tiles, tiling.offsets, len(tiles), a.stride(0), n, k,
            TRANSPOSED=transposed, GATHER=index is not None, **launch_settings(config, w),
        )  # fmt: skip
    return out
