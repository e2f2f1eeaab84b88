"""Grouped products in Triton: rows that are grouped by expert, times the weights of their expert, and the reverse.

The products of a Mixture-of-Experts layer have sizes that only the device knows. So the grid is laid out for the most
tiles that there can be, floor(M / block_m) + E, and a table on the device says which expert and which rows each tile
has; there is no host sync. Rows are read through an index where the caller has one, so that no sorted copy of the
tokens exists, and what follows a product (SwiGLU, and its backward) is done on the tile while it is in registers.

    rows_times_weights    y[m] = W[e] x[m], or W[e]^T x[m]                         forward, input gradients
    swiglu_up             z[m] = W1[e] x[m];  h[m] = silu(gate) * up               z = [gate; up]
    swiglu_down_backward  (W2[e]^T dy[m]) through the weighting and SwiGLU         dz, weighted h, weight gradients
    weight_gradients      dW[e] = sum over the rows m of e of a[m] b[m]^T          fp32 sums, added to what is there

The graph is SonicMoE's (arXiv 2512.14080) without its atomics. A program takes every num_programs-th tile, so that
`num_sms` of them leave the other multiprocessors to communication.

M rows in expert-major order, E experts, D model dim, F inner width; N columns of a product, K length of its sum.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import TileConfig, lookup
from .device import arch_of, dot_precision

# ---- which tile has which rows ----


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
    done = slot[:, None] >= last_E[None, :]  # the experts whose tiles come before this one
    expert = tl.sum(tl.where(done, 1, 0), 1)  # E or more behind the last tile
    mine = e[None, :] == expert[:, None]
    row = tl.sum(tl.where(mine, (starts - (last_E - tiles_E) * BLOCK_M)[None, :], 0), 1) + slot * BLOCK_M
    inside = slot < slots
    tl.store(tiles + slot * 2, tl.where(expert < E, expert, -1), mask=inside)
    tl.store(tiles + slot * 2 + 1, row, mask=inside)


@dataclass(slots=True)
class Tiling:
    """The tiles of M rows, by tile height: [slots, 2] int32 of (expert, first row), expert -1 where there is no tile.

    Example: offsets [0, 3, 3, 8] in tiles of 2 rows are (0, 0) (0, 2) (2, 3) (2, 5) (2, 7) (-1, .) (-1, .).
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
            _tile_table_kernel[(triton.cdiv(slots, block_s),)](
                self.offsets, tiles, slots, num_experts, triton.next_power_of_2(num_experts), block_m, block_s
            )
            self._tables[block_m] = tiles
        return self._tables[block_m]


# ---- the parts of a product ----


@triton.jit
def _grouped(tile, rows, COLUMNS: tl.constexpr, GROUP_M: tl.constexpr):
    """The number of a tile -> its place among `rows` x COLUMNS tiles, GROUP_M rows at a time."""
    first = tile // (GROUP_M * COLUMNS) * GROUP_M
    height = tl.minimum(rows - first, GROUP_M)
    within = tile % (GROUP_M * COLUMNS)
    return first + within % height, within // height


@triton.jit
def _place(tile, tiles, offsets, slots, TILES_N: tl.constexpr, GROUP_M: tl.constexpr):
    """The number of a tile -> its expert (-1: there is no such tile), first row, end of rows, and column tile."""
    slot, n_tile = _grouped(tile, slots, TILES_N, GROUP_M)
    e = tl.load(tiles + slot * 2)
    return e, tl.load(tiles + slot * 2 + 1), tl.load(offsets + e + 1), n_tile


@triton.jit
def _rows_of(index, first, end, GATHER: tl.constexpr, BLOCK_M: tl.constexpr):
    """The rows of a tile, in int64: past the end, the last one again, which is never stored."""
    m = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
    return tl.load(index + m).to(tl.int64) if GATHER else m.to(tl.int64)


@triton.jit
def _weights(
    w, e, n0, k0, N: tl.constexpr, K: tl.constexpr,
    TRANSPOSED: tl.constexpr, PAIRED: tl.constexpr, TMA: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_K, BLOCK_N] of the weights of expert e.

    They are stored [E, N, K], or [E, K, N] if TRANSPOSED. PAIRED: [E, 2, N, K], of which the tile has BLOCK_N / 2
    columns of either half.
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
def _product(
    a_rows, w, e, n0, N: tl.constexpr, K: tl.constexpr, TRANSPOSED: tl.constexpr, PAIRED: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tile [BLOCK_M, BLOCK_N] of rows times weights, in fp32. a_rows: where each row begins."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k0 in range(0, K, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        if K % BLOCK_K == 0:
            a = tl.load(a_rows[:, None] + k[None, :])
        else:
            a = tl.load(a_rows[:, None] + k[None, :], mask=(k < K)[None, :], other=0.0)
        b = _weights(w, e, n0, k0, N, K, TRANSPOSED, PAIRED, TMA, BLOCK_N, BLOCK_K)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The left and the right half of a tile [ROWS, COLUMNS]."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def _store(out, x, m, n0, end, STRIDE: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Write a tile to out[m, n0 : n0 + COLUMNS], as far as that is inside [end, N]; rows are STRIDE apart.

    TILE: the columns from which on tiles are counted off; if they divide N, so does every part of them.
    """
    n = n0 + tl.arange(0, COLUMNS)
    pointers = out + m.to(tl.int64)[:, None] * STRIDE + n[None, :]
    if N % TILE == 0:
        tl.store(pointers, x.to(out.dtype.element_ty), mask=(m < end)[:, None])
    else:
        tl.store(pointers, x.to(out.dtype.element_ty), mask=(m < end)[:, None] & (n < N)[None, :])


# ---- rows times weights ----


@triton.jit(do_not_specialize=["slots"])
def rows_times_weights_kernel(
    a, index, w, out, tiles, offsets, slots, STRIDE_A: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    TRANSPOSED: tl.constexpr, GATHER: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in range(tl.program_id(0), slots * TILES_N, tl.num_programs(0)):
        e, first, end, n_tile = _place(tile, tiles, offsets, slots, TILES_N, GROUP_M)
        if e >= 0:
            a_rows = a + _rows_of(index, first, end, GATHER, BLOCK_M) * STRIDE_A
            n0 = n_tile * BLOCK_N
            acc = _product(a_rows, w, e, n0, N, K, TRANSPOSED, False, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
            m = first + tl.arange(0, BLOCK_M)
            left, right = _halves(acc, BLOCK_M, BLOCK_N)
            _store(out, left, m, n0, end, N, N, BLOCK_N // 2, BLOCK_N)
            _store(out, right, m, n0 + BLOCK_N // 2, end, N, N, BLOCK_N // 2, BLOCK_N)


def rows_times_weights(
    kernel: str, a: Tensor, w: Tensor, tiling: Tiling, transposed: bool = False, index: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:  # fmt: skip
    """y[m] = W[e] a[m]: [M, N], for w [E, N, K]; or W[e]^T a[m], for w [E, K, N] that is `transposed`.

    a: [M, K], or [., K] with index [M], the row of a behind each m. kernel: whose configuration to take.
    """
    n, k = (w.shape[2], w.shape[1]) if transposed else (w.shape[1], w.shape[2])
    config = lookup(kernel, arch_of(a.device), a.element_size(), n, k)
    box = (1, config.block_k, config.block_n) if transposed else (1, config.block_n, config.block_k)
    out = a.new_empty(tiling.num_rows, n)
    if tiling.num_rows:
        tiles = tiling(config.block_m)
        rows_times_weights_kernel[_grid(len(tiles), n, config.block_n, num_sms)](
            a, index, _weights_argument(w, box, config), out, tiles, tiling.offsets, len(tiles), a.stride(0), n, k,
            TRANSPOSED=transposed, GATHER=index is not None, **_settings(config, w),
        )  # fmt: skip
    return out


def _grid(slots: int, columns: int, block_n: int, num_sms: int | None) -> tuple[int]:
    tiles = slots * triton.cdiv(columns, block_n)
    return (tiles if num_sms is None else min(tiles, num_sms),)


def _tma(w: Tensor, config: TileConfig) -> bool:
    """Whether the weights go through the tensor memory accelerator: rows must be a multiple of 16 bytes apart."""
    return config.tma and w.shape[-1] * w.element_size() % 16 == 0 and w.data_ptr() % 16 == 0


def _weights_argument(w: Tensor, box: tuple[int, int, int], config: TileConfig) -> Tensor | TensorDescriptor:
    if not _tma(w, config):
        return w
    _, rows, columns = w.shape
    # Not w.stride(): of a dimension of one it may be anything, and a descriptor takes multiples of 16 bytes only.
    return TensorDescriptor(w, [*w.shape], [rows * columns, columns, 1], [*box])


def _settings(config: TileConfig, w: Tensor) -> dict[str, Any]:
    return {
        "TMA": _tma(w, config), "PRECISION": dot_precision(w.dtype), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m,
        "num_warps": config.warps, "num_stages": config.stages,
    }  # fmt: skip
