"""Grouped products in ping-pong: while one consumer stores its tile, the other multiplies the next one.

The products are those of `rows_times_weights`. Each consumer is a warpgroup with tiles of its own.

M rows in expert-major order, E experts, N columns of a product, K length of the sum.
"""

import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

from ..configs import TileConfig
from ..launch_args import launch_grid
from ..tiles import Tiling, locate_tile
from .launch import describe_rows, describe_weights, ragged_rows, register_options
from .ring import create_barriers, create_ring, finish_steps, multiply_steps, pass_turn, wait_for_turn
from .rows import load_products, store_rows


@gluon.jit
def _multiply_tiles(
    out, staging, ring, turns, tiles, WHO: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    TRANSPOSED: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Consumer WHO: every second tile of the program."""
    BLOCK_M: gl.constexpr = out.block_shape[2]
    BLOCK_N: gl.constexpr = out.block_shape[4]
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (K + ring[0].shape[2] - 1) // ring[0].shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    rows = gl.load(tiles)
    count = WHO
    for tile in range(gl.program_id(0) + WHO * gl.num_programs(0), rows * TILES_N, 2 * gl.num_programs(0)):
        _, first, end, n_tile = locate_tile(tile, tiles, rows, TILES_N, GROUP_M)
        wait_for_turn(turns, count, WHO)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
        acc = multiply_steps(ring, count * STEPS, STEPS, acc, False, not TRANSPOSED, False)
        pass_turn(turns, WHO)
        acc = finish_steps(ring, acc, (count + 1) * STEPS)
        tma.store_wait(0)  # of the last tile, from the same memory
        store_rows(out, acc, staging.index(WHO), first, end, 0, n_tile * BLOCK_N)
        count += 2
    tma.store_wait(0)


@gluon.jit
def rows_times_weights_kernel(
    a, w, out, tiles, N: gl.constexpr, K: gl.constexpr, TRANSPOSED: gl.constexpr,
    STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = out.block_shape[4]
    a_buffers = gl.allocate_shared_memory(a.dtype, [STAGES] + a.block_shape, a.layout)
    w_buffers = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    ring = create_ring(a_buffers, w_buffers, False)
    turns = create_barriers(2, 1)
    staging = gl.allocate_shared_memory(out.dtype, [2] + out.block_shape, out.layout)
    gl.warp_specialize([
        (_multiply_tiles, (out, staging, ring, turns, tiles, 0, N, K, TRANSPOSED, GROUP_M)),
        (_multiply_tiles, (out, staging, ring, turns, tiles, 1, N, K, TRANSPOSED, GROUP_M)),
        (load_products, (a, None, w, ring, tiles, 0, N, K, BLOCK_N, TRANSPOSED, False, GROUP_M)),
    ], [4, 4], [232, 40])  # fmt: skip


def rows_times_weights(
    a: Tensor, w: Tensor, out: Tensor, tiling: Tiling, transposed: bool, config: TileConfig, num_sms: int | None
) -> None:
    """Fill out [M, N] as `rows_times_weights` of the Triton kernels does."""
    n, k = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    box = (1, config.block_k, config.block_n) if transposed else (1, config.block_n, config.block_k)
    grid = launch_grid(tiling.max_tiles(config.block_m), n, config.block_n, config, num_sms, a.device)
    rows_times_weights_kernel[grid](
        describe_rows(a, config.block_m, config.block_k), describe_weights(w, box),
        ragged_rows(out, 1, config.block_m, config.block_n), tiling(config.block_m), n, k, transposed, config.stages,
        config.group_m, **register_options(config),
    )  # fmt: skip
