"""Weight gradients of a grouped product, for Hopper: dW[e] = sum of a[m] b[m]^T over the rows m of expert e.

Both consumers work on one tile of dW. A step of its sum is BLOCK_K rows of the expert. The producer gathers them with
cp.async, or loads them with TMA; both fill rows past the end of the expert with zeros.

M rows in expert-major order, E experts, I and J the widths of a and b.
"""

import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

from ..configs import TileConfig
from ..launch_args import ceil_div, launch_grid
from ..tiles import grouped_order
from .launch import layout_of, ragged_rows, register_options
from .ring import acquire_slot, create_ring, finish_steps, multiply_steps
from .rows import GATHER_LAYOUT, ragged_coordinates, rows_of, split_columns


@gluon.jit
def _locate_tile(tile, offsets, TILES_I: gl.constexpr, TILES_J: gl.constexpr, BLOCK_K: gl.constexpr,
                 GROUP_M: gl.constexpr):  # fmt: skip
    """Map a tile number to (expert, row tile, column tile, first row and end of the expert, steps of its sum)."""
    e = tile // (TILES_I * TILES_J)
    i_tile, j_tile = grouped_order(tile % (TILES_I * TILES_J), TILES_I, TILES_J, GROUP_M)
    start, end = gl.load(offsets + e), gl.load(offsets + e + 1)
    # An expert without rows has one step, of zeros.
    return e, i_tile, j_tile, start, end, gl.maximum((end - start + BLOCK_K - 1) // BLOCK_K, 1)


@gluon.jit
def _load_indices(index, m, end):
    """The rows index[m], for m below the end; m itself without an index."""
    rows = m
    if index is not None:
        rows = gl.load(index + m, mask=m < end, other=0)
    return rows


@gluon.jit
def _load_rows(x, index, rows, buffer, full, first, end, column, STRIDE: gl.constexpr,
               WIDTH: gl.constexpr):  # fmt: skip
    """Start to copy rows first:end of x to a buffer, or `rows` of it, which _load_indices returned for them."""
    if index is None:
        tma.async_copy_global_to_shared(x, ragged_coordinates(first, end, 0, column), full, buffer)
    else:
        m = first + gl.arange(0, buffer.shape[0], gl.SliceLayout(1, GATHER_LAYOUT))
        j = column + gl.arange(0, buffer.shape[1], gl.SliceLayout(0, GATHER_LAYOUT))
        pointers = (x + rows.to(gl.int64) * STRIDE)[:, None] + j[None, :]
        async_copy.async_copy_global_to_shared(buffer, pointers, mask=(m < end)[:, None] & (j < WIDTH)[None, :])


@gluon.jit
def _load_tiles(
    a, index_a, b, index_b, ring, offsets, num_experts, STRIDE_A: gl.constexpr, STRIDE_B: gl.constexpr,
    I: gl.constexpr, J: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """The producer."""
    TILES_I: gl.constexpr = (I + BLOCK_M - 1) // BLOCK_M
    TILES_J: gl.constexpr = (J + BLOCK_N - 1) // BLOCK_N
    BYTES_A: gl.constexpr = a.block_type.nbytes if index_a is None else 0
    BYTES_B: gl.constexpr = b.block_type.nbytes if index_b is None else 0
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(1, GATHER_LAYOUT))
    step = 0
    for tile in range(gl.program_id(0), num_experts * TILES_I * TILES_J, gl.num_programs(0)):
        _, i_tile, j_tile, first, end, steps = _locate_tile(tile, offsets, TILES_I, TILES_J, BLOCK_K, GROUP_M)
        # Indices are loaded one step ahead.
        rows_a, rows_b = _load_indices(index_a, first + k, end), _load_indices(index_b, first + k, end)
        for _ in range(steps):
            a_tile, b_tile, full = acquire_slot(ring, step, BYTES_A + BYTES_B)
            _load_rows(a, index_a, rows_a, a_tile, full, first, end, i_tile * BLOCK_M, STRIDE_A, I)
            _load_rows(b, index_b, rows_b, b_tile, full, first, end, j_tile * BLOCK_N, STRIDE_B, J)
            if index_a is not None or index_b is not None:
                async_copy.mbarrier_arrive(full, increment_count=False)
            first += BLOCK_K
            rows_a, rows_b = _load_indices(index_a, first + k, end), _load_indices(index_b, first + k, end)
            step += 1


@gluon.jit
def _store(out, x, i0, j0, I: gl.constexpr, J: gl.constexpr, ADD: gl.constexpr):
    """Store a tile to out[i0:, j0:], or add it."""
    i = rows_of(x, i0)
    j = j0 + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    pointers = out + i[:, None] * J + j[None, :]
    mask = (i < I)[:, None] & (j < J)[None, :]
    if ADD:
        x += gl.load(pointers, mask=mask, other=0.0).to(gl.float32)
    gl.store(pointers, x.to(out.dtype.element_ty), mask=mask)


@gluon.jit
def _multiply_tiles(
    out, ring, offsets, num_experts, GATHER: gl.constexpr, ADD: gl.constexpr, I: gl.constexpr, J: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Both consumers together."""
    TILES_I: gl.constexpr = (I + BLOCK_M - 1) // BLOCK_M
    TILES_J: gl.constexpr = (J + BLOCK_N - 1) // BLOCK_N
    PART: gl.constexpr = BLOCK_N // 4
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_N, 16])
    step = 0
    for tile in range(gl.program_id(0), num_experts * TILES_I * TILES_J, gl.num_programs(0)):
        e, i_tile, j_tile, _, _, steps = _locate_tile(tile, offsets, TILES_I, TILES_J, BLOCK_K, GROUP_M)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
        acc = multiply_steps(ring, step, steps, acc, True, False, GATHER)
        step += steps
        acc = finish_steps(ring, acc, step)
        left, right = split_columns(acc)
        parts = split_columns(left) + split_columns(right)
        for part in gl.static_range(4):
            out_e = out + e.to(gl.int64) * (I * J)
            _store(out_e, parts[part], i_tile * BLOCK_M, j_tile * BLOCK_N + part * PART, I, J, ADD)


@gluon.jit(do_not_specialize=["num_experts"])
def weight_gradients_kernel(
    a, index_a, b, index_b, out, offsets, num_experts, STRIDE_A: gl.constexpr, STRIDE_B: gl.constexpr,
    I: gl.constexpr, J: gl.constexpr, A: gl.constexpr, A_LAYOUT: gl.constexpr, B: gl.constexpr,
    B_LAYOUT: gl.constexpr, ADD: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    GATHER: gl.constexpr = index_a is not None or index_b is not None
    a_buffers = gl.allocate_shared_memory(a.dtype.element_ty if index_a is not None else a.dtype, A, A_LAYOUT)
    b_buffers = gl.allocate_shared_memory(b.dtype.element_ty if index_b is not None else b.dtype, B, B_LAYOUT)
    ring = create_ring(a_buffers, b_buffers, GATHER)
    gl.warp_specialize([
        (_multiply_tiles, (out, ring, offsets, num_experts, GATHER, ADD, I, J, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M)),
        (_load_tiles, (a, index_a, b, index_b, ring, offsets, num_experts, STRIDE_A, STRIDE_B, I, J, BLOCK_M, BLOCK_N,
                       BLOCK_K, GROUP_M)),
    ], [4], [56])  # fmt: skip


def weight_gradients(
    a: Tensor, b: Tensor, offsets: Tensor, out: Tensor, index_a: Tensor | None, index_b: Tensor | None, add: bool,
    config: TileConfig, num_sms: int | None,
) -> None:  # fmt: skip
    """Fill out [E, I, J], or add to it, as `weight_gradients` of the Triton kernels does."""
    num_experts, i, j = out.shape
    rows, stages = config.block_k, config.stages
    operands = []
    for x, index, columns in ((a, index_a, config.block_m), (b, index_b, config.block_n)):
        box = (1, 1, rows, 1, columns) if index is None else (rows, columns)
        argument = ragged_rows(x, 1, rows, columns) if index is None else x
        operands.append((argument, (stages, *box), layout_of(box, x.dtype)))
    (a_argument, a_shape, a_layout), (b_argument, b_shape, b_layout) = operands
    row_tiles = num_experts * ceil_div(i, config.block_m)
    grid = launch_grid(row_tiles, j, config.block_n, config, num_sms, a.device)
    weight_gradients_kernel[grid](
        a_argument, index_a, b_argument, index_b, out, offsets, num_experts, a.stride(0), b.stride(0), i, j, a_shape,
        a_layout, b_shape, b_layout, add, config.block_m, config.block_n, rows, config.group_m,
        **register_options(config),
    )  # fmt: skip
