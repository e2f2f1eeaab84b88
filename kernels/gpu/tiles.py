"""Device code that the grouped products share: the table of tiles, and functions that load and store a tile.

The number of rows of each expert is known only on the device, and reading it on the host would be a sync. So the grid
is sized for the largest possible number of tiles, floor(M / block_m) + E. `Tiling` builds a table on the device with
the true number of tiles, and the expert and rows of each.

Program i of P computes the tiles i, i + P, i + 2P, ... With `num_sms`, P is at most that number, which leaves the other
multiprocessors to communication.

M rows in expert-major order, E experts; N columns of a product, K length of the sum.
"""

from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_args import ceil_div, next_power_of_2

# ---- the table of tiles ----


@triton.jit
def store_tiles(tiles, starts, ends, E_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr):
    """Write the table of tiles, all programs together. starts, ends: the rows of each expert, [E_PADDED]."""
    tiles_E = (ends - starts + BLOCK_M - 1) // BLOCK_M
    last_E = tl.cumsum(tiles_E, 0)
    origin_E = starts - (last_E - tiles_E) * BLOCK_M
    count = tl.sum(tiles_E, 0)
    for first in range(tl.program_id(0) * BLOCK_S, count, tl.num_programs(0) * BLOCK_S):
        slot = first + tl.arange(0, BLOCK_S)
        # The expert of a slot is the number of experts whose tiles are all before it. Binary search.
        expert = slot * 0
        width = E_PADDED
        while width > 0:
            further = tl.minimum(expert + width, E_PADDED)
            expert = tl.where(tl.gather(last_E, further - 1, 0) <= slot, further, expert)
            width = width // 2
        expert = tl.minimum(expert, E_PADDED - 1)
        entry = tiles + 3 + slot * 3
        tl.store(entry, expert, mask=slot < count)
        tl.store(entry + 1, tl.gather(origin_E, expert, 0) + slot * BLOCK_M, mask=slot < count)
        tl.store(entry + 2, tl.gather(ends, expert, 0), mask=slot < count)
    tl.store(tiles, count, mask=tl.program_id(0) == 0)


@triton.jit
def _tile_table_kernel(
    offsets, tiles, E: tl.constexpr, E_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr
):
    e = tl.arange(0, E_PADDED)
    starts = tl.load(offsets + e, mask=e < E, other=0)
    ends = tl.load(offsets + e + 1, mask=e < E, other=0)
    store_tiles(tiles, starts, ends, E_PADDED, BLOCK_M, BLOCK_S)


@dataclass(slots=True)
class Tiling:
    """Divides M rows, grouped by expert, into tiles of equal height. `tiling(block_m)` returns the table of tiles.

    The table is [1 + slots, 3] int32. Its first row begins with the number of tiles. The others are (expert, first row,
    end of the expert's rows) for each tile; unused ones are uninitialized. It is built once for each block_m.
    tables: those that are built already; they may have more slots.

    Example: offsets [0, 3, 3, 8] with block_m 2 give (5, ., .) (0, 0, 3) (0, 2, 3) (2, 3, 8) (2, 5, 8) (2, 7, 8).
    """

    offsets: Tensor
    num_rows: int
    tables: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, block_m: int) -> Tensor:
        if block_m not in self.tables:
            num_experts = len(self.offsets) - 1
            slots = self.max_tiles(block_m)
            tiles = torch.empty(1 + slots, 3, dtype=torch.int32, device=self.offsets.device)
            block_s = 128
            _tile_table_kernel[(ceil_div(slots, block_s),)](
                self.offsets, tiles, num_experts, next_power_of_2(num_experts), block_m, block_s
            )
            self.tables[block_m] = tiles
        return self.tables[block_m]

    def max_tiles(self, block_m: int) -> int:
        """The largest possible number of tiles."""
        return self.num_rows // block_m + len(self.offsets) - 1


# ---- parts of kernels ----


@triton.jit
def grouped_order(tile, rows, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """Map a tile number to (row tile, column tile), in Triton's grouped order.

    Groups of GROUP_M row tiles pass over all COLUMNS column tiles together, which reuses weights in the L2 cache.
    """
    first = tile // (GROUP_M * COLUMNS) * GROUP_M
    height = tl.minimum(rows - first, GROUP_M)
    within = tile % (GROUP_M * COLUMNS)
    return first + within % height, within // height


@triton.jit
def locate_tile(tile, tiles, count, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Map a tile number to (expert, first row, end of the expert's rows, column tile). count: number of row tiles."""
    row_tile, n_tile = grouped_order(tile, count, TILES_N, GROUP_M)
    entry = tiles + 3 + row_tile * 3
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2), n_tile


@triton.jit
def tile_rows(index, first, end, GATHER: tl.constexpr, BLOCK_M: tl.constexpr):
    """Row indices of a tile, in int64. Past the end they repeat the last row, so that loads need no mask."""
    m = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
    return tl.load(index + m).to(tl.int64) if GATHER else m.to(tl.int64)


@triton.jit
def load_weight_tile(
    w, e, n0, k0, N: tl.constexpr, K: tl.constexpr,
    TRANSPOSED: tl.constexpr, PAIRED: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Load a tile [BLOCK_K, BLOCK_N] of the weights of expert e.

    Weights are stored as [E, N, K]; as [E, K, N] if TRANSPOSED; as [E, 2, N, K] if PAIRED. A PAIRED tile has
    BLOCK_N / 2 columns of each half.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    k = k0 + tl.arange(0, BLOCK_K)
    n = n0 + tl.arange(0, BLOCK_N)
    if TMA:
        if TRANSPOSED:
            tile = w.load([e, k0, n0]).reshape(BLOCK_K, BLOCK_N)
        elif PAIRED:
            tile = w.load([2 * e, n0, k0]).reshape(BLOCK_N, BLOCK_K).T
        else:
            tile = w.load([e, n0, k0]).reshape(BLOCK_N, BLOCK_K).T
    else:
        if TRANSPOSED:
            pointers = w + e.to(tl.int64) * (N * K) + k[:, None] * N + n[None, :]
        elif PAIRED:
            column = tl.arange(0, BLOCK_N)
            n = n0 + column % HALF
            rows = column // HALF * N + n
            pointers = w + e.to(tl.int64) * (2 * N * K) + rows[None, :] * K + k[:, None]
        else:
            pointers = w + e.to(tl.int64) * (N * K) + n[None, :] * K + k[:, None]
        even_n: tl.constexpr = N % (HALF if PAIRED else BLOCK_N) == 0
        if even_n and K % BLOCK_K == 0:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(k < K)[:, None] & (n < N)[None, :], other=0.0)
    return tile


@triton.jit
def tile_product(
    a, rows, w, e, n0, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr, PAIRED: tl.constexpr,
    TMA_ROWS: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, BLOCK_N] of rows times weights, in fp32. rows: offset of each row; the first one if TMA_ROWS."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        if TMA_ROWS:  # rows of the next expert, if any, only change rows of acc that are not stored
            a_tile = a.load([rows, k0])
        elif K % BLOCK_K == 0:
            a_tile = tl.load(a + rows[:, None] + k[None, :])
        else:
            a_tile = tl.load(a + rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
        b_tile = load_weight_tile(w, e, n0, k0, N, K, TRANSPOSED, PAIRED, TMA, BLOCK_N, BLOCK_K)
        acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def load_ragged(a, m, end, i0, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load a tile from a[m:, i0:], with zeros for rows from `end` on. a: a descriptor of `ragged_argument`."""
    FAR: tl.constexpr = 2**30
    return a.load([FAR, end, FAR - end + m, i0]).reshape(ROWS, COLUMNS)


@triton.jit
def store_ragged(out, x, first, end, n0):
    """Write a tile to out[first:, n0:], except for rows from `end` on. out: a descriptor of `ragged_argument`."""
    FAR: tl.constexpr = 2**30
    out.store([FAR, end, FAR - end + first, n0], x.to(out.dtype).reshape(1, 1, x.shape[0], x.shape[1]))


@triton.jit
def split_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split a tile [ROWS, COLUMNS] into its left and right half."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def split_in_four(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split a tile [ROWS, COLUMNS] into four parts, from left to right."""
    left, right = split_columns(x, ROWS, COLUMNS)
    x0, x1 = split_columns(left, ROWS, COLUMNS // 2)
    x2, x3 = split_columns(right, ROWS, COLUMNS // 2)
    return x0, x1, x2, x3


@triton.jit
def store_tile(out, x, m, n0, end, STRIDE: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Write a tile to out[m, n0 : n0 + COLUMNS] where m < end and the column is below N. Rows are STRIDE apart.

    TILE: width of the whole tile, which may be split into parts of COLUMNS. If TILE divides N, columns need no mask.
    """
    n = n0 + tl.arange(0, COLUMNS)
    pointers = out + m.to(tl.int64)[:, None] * STRIDE + n[None, :]
    if N % TILE == 0:
        tl.store(pointers, x.to(out.dtype.element_ty), mask=(m < end)[:, None])
    else:
        tl.store(pointers, x.to(out.dtype.element_ty), mask=(m < end)[:, None] & (n < N)[None, :])
