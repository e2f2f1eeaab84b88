"""Gather rows and sum them with weights, in Triton. Memory-bound: each row is read and written once.

    gather_rows     out[m] = x[index[m]], optionally times a weight
    sum_rows        y[n] = sum over k of weights[n, k] rows[positions[n, k]], skipping -1; in fp32, in the order of k
    dot_rows        w[n, k] = <dy[n], rows[positions[n, k]]>, zero where the position is -1
    sum_partials    w[n, k] = sum over i of sums[i, positions[n, k]], zero where the position is -1

A program handles a block of whole rows, or a part of one long row. A thread has eight elements, which is one load of 16
bytes in 16-bit dtypes.

N rows, K choices per row, M rows in another order, D width of a row.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch_args import ceil_div, next_power_of_2

TILE = 2048  # elements that a program moves


def _blocks(columns: int) -> tuple[int, int, int]:
    """Return (rows, columns, warps) of a tile such that each thread has eight elements."""
    block_d = min(next_power_of_2(columns), TILE)
    return max(1, TILE // block_d), block_d, 8


@triton.jit(do_not_specialize=["num_rows"])
def gather_rows_kernel(
    x, index, weights, choice, out, num_rows, STRIDE_X: tl.constexpr,
    STRIDE_OUT: tl.constexpr, D: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    row = tl.load(index + m, mask=m < num_rows, other=0).to(tl.int64)
    inside = (m < num_rows)[:, None] & (d < D)[None, :]
    values = tl.load(x + row[:, None] * STRIDE_X + d[None, :], mask=inside)
    if WEIGHTED:
        s = tl.load(weights + tl.load(choice + m, mask=m < num_rows, other=0), mask=m < num_rows, other=0.0)
        values = (values.to(tl.float32) * s[:, None]).to(out.dtype.element_ty)
    tl.store(out + m.to(tl.int64)[:, None] * STRIDE_OUT + d[None, :], values, mask=inside)


def gather_rows(
    x: Tensor, index: Tensor, out: Tensor | None = None, weights: Tensor | None = None, choice: Tensor | None = None
) -> Tensor:
    """Return x[index], [M, D], written to `out` if given. With weights, row m is times weights.flatten()[choice[m]]."""
    num_rows, columns = len(index), x.shape[1]
    out = out if out is not None else x.new_empty(num_rows, columns)
    block_m, block_d, warps = _blocks(columns)
    if out.numel():
        grid = (ceil_div(num_rows, block_m), ceil_div(columns, block_d))
        gather_rows_kernel[grid](
            x, index, weights, choice, out, num_rows, x.stride(0), out.stride(0), columns, weights is not None,
            block_m, block_d, num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def sum_rows_kernel(
    rows, positions, weights, y, num_rows, STRIDE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = n < num_rows
    choice = n.to(tl.int64) * K
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for k in tl.static_range(K):
        position = tl.load(positions + choice + k, mask=inside, other=-1).to(tl.int64)
        valid = (position >= 0)[:, None] & (d < D)[None, :]
        row = tl.load(rows + position[:, None] * STRIDE + d[None, :], mask=valid, other=0.0).to(tl.float32)
        if WEIGHTED:
            row = row * tl.load(weights + choice + k, mask=inside & (position >= 0), other=0.0)[:, None]
        total += row
    pointers = y + n.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(pointers, total.to(y.dtype.element_ty), mask=inside[:, None] & (d < D)[None, :])


def sum_rows(rows: Tensor, positions: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return y [N, D] from rows [M, D] with contiguous rows and positions [N, K]. weights: [N, K] in fp32."""
    (num_rows, k), columns = positions.shape, rows.shape[1]
    y = rows.new_empty(num_rows, columns)
    block_n, block_d, warps = _blocks(columns)
    if y.numel():
        grid = (ceil_div(num_rows, block_n), ceil_div(columns, block_d))
        sum_rows_kernel[grid](
            rows, positions, weights, y, num_rows, rows.stride(0), k, columns, weights is not None,
            block_n, block_d, num_warps=warps,
        )  # fmt: skip
    return y


@triton.jit(do_not_specialize=["num_rows"])
def dot_rows_kernel(
    dy, rows, positions, out, num_rows, STRIDE_DY: tl.constexpr, STRIDE: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = n < num_rows
    choice = n.to(tl.int64) * K + tl.program_id(1)
    position = tl.load(positions + choice, mask=inside, other=-1).to(tl.int64)
    valid = (position >= 0)[:, None]
    dy_rows = dy + n.to(tl.int64)[:, None] * STRIDE_DY
    total = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for d0 in range(0, D, BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)[None, :]
        mask = valid & (d < D)
        a = tl.load(dy_rows + d, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(rows + position[:, None] * STRIDE + d, mask=mask, other=0.0).to(tl.float32)
        total += a * b
    tl.store(out + choice, tl.sum(total, 1), mask=inside)


def dot_rows(dy: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """Return w [N, K] in fp32 from dy [N, D] and rows [M, D], both with contiguous rows."""
    (num_rows, k), columns = positions.shape, rows.shape[1]
    out = torch.empty(num_rows, k, dtype=torch.float32, device=dy.device)
    block_n, block_d, warps = _blocks(columns)
    if out.numel():
        dot_rows_kernel[(ceil_div(num_rows, block_n), k)](
            dy, rows, positions, out, num_rows, dy.stride(0), rows.stride(0), k, columns, block_n, block_d,
            num_warps=warps,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_choices", "num_rows"])
def sum_partials_kernel(sums, positions, out, num_choices, num_rows, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + i, mask=i < num_choices, other=-1).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.float32)
    for part in range(PARTS):
        total += tl.load(sums + part * num_rows.to(tl.int64) + position, mask=position >= 0, other=0.0)
    tl.store(out + i, total, mask=i < num_choices)


def sum_partials(sums: Tensor, positions: Tensor) -> Tensor:
    """Return w [N, K] in fp32 from sums [parts, M] and positions [N, K]."""
    out = torch.empty(positions.shape, dtype=torch.float32, device=sums.device)
    if out.numel():
        grid = (ceil_div(out.numel(), TILE),)
        sum_partials_kernel[grid](sums, positions, out, out.numel(), sums.shape[1], sums.shape[0], TILE)
    return out
