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

from ..backend import aligned, check_contiguous
from .configs import lookup
from .descriptors import ragged_argument, uses_tma, weights_argument
from .launch_args import arch_of, ceil_div, compile_options, dot_precision, launch_grid
from .tiles import grouped_order, load_ragged, split_in_four


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
def _load_tile(a, row, m0, end, tile, STRIDE: tl.constexpr, WIDTH: tl.constexpr, TMA: tl.constexpr,
               TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """A tile of rows from m0 on, with zeros from `end` on: [ROWS, COLUMNS], or [COLUMNS, ROWS] if TRANSPOSED."""
    if TMA:
        x = load_ragged(a, m0, end, tile * COLUMNS, ROWS, COLUMNS)
        x = x.T if TRANSPOSED else x
    else:
        inside = m0 + tl.arange(0, ROWS) < end
        offsets = row.to(tl.int64) * STRIDE
        i = _columns(tile, WIDTH, COLUMNS)
        if TRANSPOSED:  # not x.T: a transpose of the loaded tile would not be pipelined before Hopper
            x = tl.load(a + offsets[None, :] + i[:, None], mask=inside[None, :], other=0.0)
        else:
            x = tl.load(a + offsets[:, None] + i[None, :], mask=inside[:, None], other=0.0)
    return x


@triton.jit
def _row_numbers(index, m0, end, GATHER: tl.constexpr, ROWS: tl.constexpr):
    m = m0 + tl.arange(0, ROWS)
    return tl.load(index + m, mask=m < end, other=0) if GATHER else m


@triton.jit
def _write(
    out, x, e, i0, j0, I: tl.constexpr, J: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile [ROWS, COLUMNS] to out[e, i0:, j0:], or add it."""
    if TMA:
        box = x.to(out.dtype).reshape(1, ROWS, COLUMNS)
        if ADD:
            out.atomic_add([e, i0, j0], box)
        else:
            out.store([e, i0, j0], box)
    else:
        i, j = i0 + tl.arange(0, ROWS), j0 + tl.arange(0, COLUMNS)
        pointers = out + e.to(tl.int64) * (I * J) + i[:, None] * J + j[None, :]
        mask = (i < I)[:, None] & (j < J)[None, :]
        if ADD:
            x += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointers, x.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_experts"])
def weight_gradients_kernel(
    a, index_a, b, index_b, out, offsets, num_experts, STRIDE_A: tl.constexpr, STRIDE_B: tl.constexpr,
    I: tl.constexpr, J: tl.constexpr, GATHER_A: tl.constexpr, GATHER_B: tl.constexpr,
    TMA_A: tl.constexpr, TMA_B: tl.constexpr, TMA_OUT: tl.constexpr, ADD: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    TILES_I: tl.constexpr = (I + BLOCK_M - 1) // BLOCK_M
    TILES_J: tl.constexpr = (J + BLOCK_N - 1) // BLOCK_N
    QUARTER: tl.constexpr = BLOCK_N // 4
    for tile in range(tl.program_id(0), num_experts * TILES_I * TILES_J, tl.num_programs(0)):
        e = tile // (TILES_I * TILES_J)
        i_tile, j_tile = grouped_order(tile % (TILES_I * TILES_J), TILES_I, TILES_J, GROUP_M)
        start, end = tl.load(offsets + e), tl.load(offsets + e + 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        # Row numbers are loaded one step ahead and not used before, so that no step waits for them.
        row_a = _row_numbers(index_a, start, end, GATHER_A, BLOCK_K)
        row_b = _row_numbers(index_b, start, end, GATHER_B, BLOCK_K)
        m = start
        # At least one step: ptxas serializes the products of a loop that may run zero times.
        for _ in range(tl.maximum(tl.cdiv(end - start, BLOCK_K), 1)):
            a_tile = _load_tile(a, row_a, m, end, i_tile, STRIDE_A, I, TMA_A, True, BLOCK_K, BLOCK_M)
            b_tile = _load_tile(b, row_b, m, end, j_tile, STRIDE_B, J, TMA_B, False, BLOCK_K, BLOCK_N)
            m += BLOCK_K
            row_a = _row_numbers(index_a, m, end, GATHER_A, BLOCK_K)
            row_b = _row_numbers(index_b, m, end, GATHER_B, BLOCK_K)
            acc = tl.dot(a_tile, b_tile, acc, input_precision=PRECISION)
        # In four parts, so that the buffer for TMA fits beside four stages.
        x0, x1, x2, x3 = split_in_four(acc, BLOCK_M, BLOCK_N)
        i0, j0 = i_tile * BLOCK_M, j_tile * BLOCK_N
        _write(out, x0, e, i0, j0, I, J, ADD, TMA_OUT, BLOCK_M, QUARTER)
        _write(out, x1, e, i0, j0 + QUARTER, I, J, ADD, TMA_OUT, BLOCK_M, QUARTER)
        _write(out, x2, e, i0, j0 + 2 * QUARTER, I, J, ADD, TMA_OUT, BLOCK_M, QUARTER)
        _write(out, x3, e, i0, j0 + 3 * QUARTER, I, J, ADD, TMA_OUT, BLOCK_M, QUARTER)


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
        out = aligned("add_to", check_contiguous("add_to", add_to))
    else:
        out = torch.empty(num_experts, i, j, dtype=dtype, device=a.device)
    num_rows = len(a if index_a is None else index_a)
    config = lookup("wgrad", arch_of(a.device), a.element_size(), j, i, num_rows // num_experts)
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    tma_a, tma_b = (index is None and uses_tma(config, t) for index, t in ((index_a, a), (index_b, b)))
    # TMA adds in the dtype of `out`. Sums in 16 bits are rounded once, after an addition in fp32.
    tma_out = uses_tma(config, out) and (add_to is None or out.dtype == torch.float32)
    grid = launch_grid(num_experts * ceil_div(i, block_m), j, block_n, config, num_sms, a.device)
    weight_gradients_kernel[grid](
        ragged_argument(a, (block_k, block_m), tma_a), index_a, ragged_argument(b, (block_k, block_n), tma_b), index_b,
        weights_argument(out, (1, block_m, block_n // 4), tma_out), offsets, num_experts, a.stride(0), b.stride(0),
        i, j, GATHER_A=index_a is not None, GATHER_B=index_b is not None, TMA_A=tma_a, TMA_B=tma_b, TMA_OUT=tma_out,
        ADD=add_to is not None, PRECISION=dot_precision(a.dtype), BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        GROUP_M=config.group_m, **compile_options(config),
    )  # fmt: skip
    return out if add_to is None or add_to is out else add_to.copy_(out)
