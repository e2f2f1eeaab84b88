"""What the products of rows with weights share: the producer, and stores of tiles that end where an expert ends.

M rows in expert-major order, E experts, N columns of a product, K length of the sum.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, tma

from ..tiles import locate_tile
from .ring import acquire_slot

# Threads of the producer that copy a tile of rows: eight copy 128 bytes of a row.
GATHER_LAYOUT = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def load_products(
    a, index, w, ring, tiles, STRIDE_A: gl.constexpr, N: gl.constexpr, K: gl.constexpr,
    BLOCK_N: gl.constexpr, TRANSPOSED: gl.constexpr, PAIRED: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """The producer: load the tiles of all steps of all tiles of this program.

    a: descriptor of rows in expert-major order; or pointer, with the row of a for each m in index. w: descriptor of
    weights stored as [E, N, K]; as [E, K, N] if TRANSPOSED; as [2E, N, K], two for each expert, if PAIRED. A tile has
    BLOCK_N columns, of each half if PAIRED.
    """
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_K: gl.constexpr = ring[0].shape[2]
    TILES_N: gl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    GATHER: gl.constexpr = index is not None
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, GATHER_LAYOUT))
    row_tiles = gl.load(tiles)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * TILES_N, gl.num_programs(0)):
        e, first, end, n_tile = locate_tile(tile, tiles, row_tiles, TILES_N, GROUP_M)
        if GATHER:
            # Rows past the end repeat the last one; they are not stored.
            m = gl.minimum(first + gl.arange(0, BLOCK_M, gl.SliceLayout(1, GATHER_LAYOUT)), end - 1)
            rows = a + gl.load(index + m).to(gl.int64) * STRIDE_A
        for k0 in range(0, K, BLOCK_K):
            if GATHER:
                a_tile, w_tile, full = acquire_slot(ring, step, w.block_type.nbytes)
                pointers = rows[:, None] + (k0 + k)[None, :]
                async_copy.async_copy_global_to_shared(a_tile, pointers, mask=(k0 + k < K)[None, :])
                async_copy.mbarrier_arrive(full, increment_count=False)
            else:
                a_tile, w_tile, full = acquire_slot(ring, step, w.block_type.nbytes + a.block_type.nbytes)
                tma.async_copy_global_to_shared(a, [first, k0], full, a_tile)
            if TRANSPOSED:
                tma.async_copy_global_to_shared(w, [e, k0, n_tile * BLOCK_N], full, w_tile)
            else:
                tma.async_copy_global_to_shared(w, [2 * e if PAIRED else e, n_tile * BLOCK_N, k0], full, w_tile)
            step += 1


@gluon.jit
def store_rows(out, values, staging, first, end, half, column):
    """Start to store a tile to out[first:end, half, column:]. It is copied to `staging`, which TMA stores."""
    staging.reshape(values.shape).store(values.to(out.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out, ragged_coordinates(first, end, half, column), staging)


@gluon.jit
def ragged_coordinates(first, end, half, column):
    """Coordinates, in a descriptor from `ragged_rows`, of a tile of rows first:end. Rows past the end are outside."""
    origin = 1 << 30
    return origin, end, origin - (end - first), half, column


@gluon.jit
def split_columns(x):
    """Split a tile [rows, columns] into its left and right half."""
    halves = gl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return gl.split(gl.permute(halves, (0, 2, 1)))


@gluon.jit
def rows_of(x, first):
    """Index of each row of x, a tile that starts at row `first`."""
    return first + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
