"""Device code that the grouped products share: the table of tiles, and functions that load and store a tile.

The number of rows of each expert is known only on the device, and reading it on the host would be a sync. So the grid
is sized for the largest possible number of tiles, floor(M / block_m) + E. `Tiling` builds a table on the device that
maps each slot of the grid to an expert and its first row; unused slots do nothing.

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


@triton.jit(do_not_specialize=["slots"])
def _tile_table_kernel(
    offsets, tiles, slots, E: tl.constexpr, E_PADDED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr
):
    e = tl.arange(0, E_PADDED)
    starts = tl.load(offsets + e, mask=e < E, other=0)
    ends = tl.load(offsets + e + 1, mask=e < E, other=0)
    tiles_E = (ends - starts + BLOCK_M - 1) // BLOCK_M
    last_E = tl.cumsum(tiles_E, 0)
    slot = tl.program_id(0) * BLOCK_S + tl.arange(0, BLOCK_S)
    passed = slot[:, None] >= last_E[None, :]  # experts whose tiles are all before this slot
    expert = tl.sum(tl.where(passed, 1, 0), 1)  # E or more for slots after the last tile
    is_expert = e[None, :] == expert[:, None]
    row = tl.sum(tl.where(is_expert, (starts - (last_E - tiles_E) * BLOCK_M)[None, :], 0), 1) + slot * BLOCK_M
    inside = slot < slots
    tl.store(tiles + slot * 2, tl.where(expert < E, expert, -1), mask=inside)
    tl.store(tiles + slot * 2 + 1, row, mask=inside)


@dataclass(slots=True)
class Tiling:
    """Divides M rows, grouped by expert, into tiles of equal height. `tiling(block_m)` returns the table of tiles.

    The table is [slots, 2] int32: (expert, first row) of each tile, and expert -1 for an unused slot. It is built once
    for each block_m.

    Example: offsets [0, 3, 3, 8] with block_m 2 give (0, 0) (0, 2) (2, 3) (2, 5) (2, 7) (-1, .) (-1, .).
    """

    offsets: Tensor
    num_rows: int
    _tables: dict[int, Tensor] = field(default_factory=dict)

    def __call__(self, block_m: int) -> Tensor:
        if block_m not in self._tables:
            num_experts = len(self.offsets) - 1
            slots = self.num_rows // block_m + num_experts
            tiles = torch.empty(slots, 2, dtype=torch.int32, device=self.offsets.device)
            block_s = 64
            _tile_table_kernel[(ceil_div(slots, block_s),)](
                self.offsets, tiles, slots, num_experts, next_power_of_2(num_experts), block_m, block_s
            )
            self._tables[block_m] = tiles
        return self._tables[block_m]


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
def locate_tile(tile, tiles, offsets, slots, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Map a tile number to (expert, first row, end of the expert's rows, column tile); expert -1 for an unused slot."""
    slot, n_tile = grouped_order(tile, slots, TILES_N, GROUP_M)
    e = tl.load(tiles + slot * 2)
    return e, tl.load(tiles + slot * 2 + 1), tl.load(offsets + e + 1), n_tile


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
    a_rows, w, e, n0, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr, PAIRED: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_M, BLOCK_N] of rows times weights, in fp32. a_rows: pointers to the start of each row."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            a = tl.load(a_rows[:, None] + k[None, :])
        else:
            a = tl.load(a_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
        b = load_weight_tile(w, e, n0, k0, N, K, TRANSPOSED, PAIRED, TMA, BLOCK_N, BLOCK_K)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def split_columns(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split a tile [ROWS, COLUMNS] into its left and right half."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


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
