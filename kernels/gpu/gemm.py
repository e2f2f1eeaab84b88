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
from .descriptors import ragged_argument, rows_argument, uses_tma, weights_argument
from .launch_args import arch_of, launch_grid, launch_settings
from .tiles import Tiling, locate_tile, split_columns, store_ragged, store_tile, tile_product, tile_rows


@triton.jit
def rows_times_weights_kernel(
    a, index, w, out, tiles, STRIDE_A: tl.constexpr, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr,
    GATHER: tl.constexpr, TMA_ROWS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HALF: tl.constexpr = BLOCK_N // 2
    count = tl.load(tiles)
    # Flattened, the first loads of a tile overlap the stores of the previous one. Triton 3.6 needs TMA to pipeline it.
    for tile in tl.range(tl.program_id(0), count * TILES_N, tl.num_programs(0), flatten=TMA_ROWS):
        e, first, end, n_tile = locate_tile(tile, tiles, count, TILES_N, GROUP_M)
        rows = first if TMA_ROWS else tile_rows(index, first, end, GATHER, BLOCK_M) * STRIDE_A
        n0 = n_tile * BLOCK_N
        acc = tile_product(
            a, rows, w, e, n0, N, K, TRANSPOSED, False, TMA_ROWS, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K
        )
        left, right = split_columns(acc, BLOCK_M, BLOCK_N)
        if TMA_ROWS:
            store_ragged(out, left, first, end, n0)
            store_ragged(out, right, first, end, n0 + HALF)
        else:
            m = first + tl.arange(0, BLOCK_M)
            store_tile(out, left, m, n0, end, N, N, HALF, BLOCK_N)
            store_tile(out, right, m, n0 + HALF, end, N, N, HALF, BLOCK_N)


def rows_times_weights(
    kernel: str, a: Tensor, w: Tensor, tiling: Tiling, transposed: bool = False, index: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:  # fmt: skip
    """Return y [M, N] with y[m] = W[e] a[m] for w [E, N, K], or W[e]^T a[m] for w [E, K, N] if `transposed`.

    a: [M, K], or [., K] with index [M], the row of a for each m. kernel: the name to look up tile sizes (configs.py).
    """
    n, k = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    config = lookup(kernel, arch_of(a.device), a.element_size(), n, k, tiling.num_rows // len(w))
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    box = (1, block_k, block_n) if transposed else (1, block_n, block_k)
    out = a.new_empty(tiling.num_rows, n)
    tma, tma_rows = uses_tma(config, w), index is None and uses_tma(config, a, w, out)
    if tiling.num_rows:
        grid = launch_grid(tiling.max_tiles(block_m), n, block_n, config, num_sms, a.device)
        rows_times_weights_kernel[grid](
            rows_argument(a, (block_m, block_k), tma_rows), index, weights_argument(w, box, tma),
            ragged_argument(out, (block_m, block_n // 2), tma_rows), tiling(block_m), a.stride(0), n, k,
            TRANSPOSED=transposed, GATHER=index is not None, TMA_ROWS=tma_rows, **launch_settings(config, w, tma),
        )  # fmt: skip
    return out
