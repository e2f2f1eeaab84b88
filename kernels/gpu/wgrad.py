"""Weight gradients of a grouped product: for each expert, the sum of outer products over its rows.

    dW[e] = sum of a[m] b[m]^T over the rows m of expert e

One program computes one tile of one expert and loops over all rows of that expert. There are no atomics, so results
are the same in every run. Sums are taken in fp32 and can be added to an existing gradient, which saves a pass over all
weights. An expert without rows gets zeros.

M rows in expert-major order, E experts, I and J the widths of a and b.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..backend import check_contiguous
from .configs import lookup
from .launch_args import arch_of, ceil_div, compile_options, dot_precision, launch_grid
from .tiles import grouped_order, split_columns


@triton.jit
def _columns(tile, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Columns of a tile. Past the end, they repeat the first columns: loads need no mask, and stores mask them."""
    i = tile * COLUMNS + tl.arange(0, COLUMNS)
    if WIDTH % COLUMNS != 0:
        VECTOR: tl.constexpr = 8 if WIDTH % 8 == 0 else 1
        i = tl.where(i < WIDTH, i, i % VECTOR)
        i = tl.max_contiguous(tl.multiple_of(i, VECTOR), VECTOR)  # VECTOR columns are one load
    return i


@triton.jit
def _row_offsets(index, m, inside, STRIDE: tl.constexpr, GATHER: tl.constexpr):
    row = tl.load(index + m, mask=inside, other=0).to(tl.int64) if GATHER else m.to(tl.int64)
    return row * STRIDE


@triton.jit
def _add_to(out, x, i, j, I: tl.constexpr, J: tl.constexpr, ADD: tl.constexpr):
    pointers = out + i[:, None] * J + j[None, :]
    mask = (i < I)[:, None] & (j < J)[None, :]
    if ADD:
        x += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_experts"])
def weight_gradients_kernel(
    a, index_a, b, index_b, out, offsets, num_experts, STRIDE_A: tl.constexpr, STRIDE_B: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr,
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    TILES_I: tl.constexpr = (I + BLOCK_M - 1) // BLOCK_M
    TILES_J: tl.constexpr = (J + BLOCK_N - 1) // BLOCK_N
    HALF: tl.constexpr = BLOCK_N // 2
    for tile in range(tl.program_id(0), num_experts * TILES_I * TILES_J, tl.num_programs(0)):
        e = tile // (TILES_I * TILES_J)
        i_tile, j_tile = grouped_order(tile % (TILES_I * TILES_J), TILES_I, TILES_J, GROUP_M)
        start, end = tl.load(offsets + e), tl.load(offsets + e + 1)
        i, j = _columns(i_tile, I, BLOCK_M), _columns(j_tile, J, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        m = start + tl.arange(0, BLOCK_K)
        # Row offsets are loaded one step ahead, so that the loads of the rows do not wait for them.
        row_a = _row_offsets(index_a, m, m < end, STRIDE_A, GATHER_A)
        row_b = _row_offsets(index_b, m, m < end, STRIDE_B, GATHER_B)
        # At least one step: ptxas serialises the products of a loop that may run zero times.
        for _ in range(tl.maximum(tl.cdiv(end - start, BLOCK_K), 1)):
            inside = m < end
            # [columns, rows]: a transpose of the loaded tile would not be pipelined before Hopper.
            a_tile = tl.load(a + row_a[None, :] + i[:, None], mask=inside[None, :], other=0.0)
            b_tile = tl.load(b + row_b[:, None] + j[None, :], mask=inside[:, None], other=0.0)
            m += BLOCK_K
            row_a = _row_offsets(index_a, m, m < end, STRIDE_A, GATHER_A)
            row_b = _row_offsets(index_b, m, m < end, STRIDE_B, GATHER_B)
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        out_e = out + e.to(tl.int64) * (I * J)
        left, right = split_columns(acc, BLOCK_M, BLOCK_N)
        i = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        j = j_tile * BLOCK_N + tl.arange(0, HALF)
        _add_to(out_e, left, i, j, I, J, ADD)
        _add_to(out_e, right, i, j + HALF, I, J, ADD)


def weight_gradients(
    a: Tensor, b: Tensor, offsets: Tensor, dtype: torch.dtype, index_a: Tensor | None = None,
    index_b: Tensor | None = None, add_to: Tensor | None = None, num_sms: int | None = None,
) -> Tensor:  # fmt: skip
    """Return dW [E, I, J] in `dtype` from a [M, I] and b [M, J]; or add it to `add_to` in place and return that.

    index_a, index_b: [M], the row of a or b for each m; a or b may then have any number of rows. Raises ValueError if
    `add_to`, which may be a `.grad` that the user has set, is not contiguous.
    """
    num_experts, i, j = len(offsets) - 1, a.shape[1], b.shape[1]
    if add_to is not None:
        out = check_contiguous("add_to", add_to)
    else:
        out = torch.empty(num_experts, i, j, dtype=dtype, device=a.device)
    config = lookup("wgrad", arch_of(a.device), a.element_size(), j, i)
    row_tiles = num_experts * ceil_div(i, config.block_m)
    grid = launch_grid(row_tiles, j, config.block_n, config, num_sms, a.device)
    weight_gradients_kernel[grid](
        a, index_a, b, index_b, out, offsets, num_experts, a.stride(0), b.stride(0), i, j,
        GATHER_A=index_a is not None, GATHER_B=index_b is not None, ADD=add_to is not None,
        PRECISION=dot_precision(a.dtype), BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        GROUP_M=config.group_m, **compile_options(config),
    )  # fmt: skip
    return out
