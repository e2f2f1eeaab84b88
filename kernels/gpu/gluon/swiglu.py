"""The products of experts that are fused with SwiGLU, for Hopper. ../swiglu.py has their formulas.

swiglu_up is cooperative: both consumers work on one tile, of 128 columns of gate and 128 of up. swiglu_down_backward is
in ping-pong, because its epilogue is long: while one consumer is in it, the other multiplies.

M rows in expert-major order, E experts, D model dim, F inner width.
"""

import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ..configs import TileConfig
from ..launch_args import launch_grid
from ..tiles import Tiling, locate_tile
from .launch import describe_weights, layout_of, ragged_rows, register_options
from .ring import create_barriers, create_ring, finish_steps, multiply_steps, pass_turn, wait_for_turn
from .rows import load_products, ragged_coordinates, rows_of, split_columns, store_rows


@gluon.jit
def _routing_weight(weights, choice, m, end):
    """The routing weight of each row, or 1 without weights."""
    if weights is None:
        s = gl.full(m.shape, 1.0, gl.float32, m.type.layout)
    else:
        inside = m < end
        s = gl.load(weights + gl.load(choice + m, mask=inside, other=0), mask=inside, other=0.0)
    return s


# ---- up ----


@gluon.jit
def _multiply_up_tiles(
    z, h, weights, choice, staging, ring, tiles, F: gl.constexpr, D: gl.constexpr,
    GROUP_M: gl.constexpr,
):  # fmt: skip
    """Both consumers together: all tiles of the program."""
    PART: gl.constexpr = h.block_shape[4]
    HALF: gl.constexpr = 2 * PART
    BLOCK_M: gl.constexpr = h.block_shape[2]
    TILES_N: gl.constexpr = (F + HALF - 1) // HALF
    STEPS: gl.constexpr = (D + ring[0].shape[2] - 1) // ring[0].shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 2 * HALF, 16])
    row_tiles = gl.load(tiles)
    step = 0
    for tile in range(gl.program_id(0), row_tiles * TILES_N, gl.num_programs(0)):
        _, first, end, n_tile = locate_tile(tile, tiles, row_tiles, TILES_N, GROUP_M)
        acc = gl.zeros((BLOCK_M, 2 * HALF), gl.float32, LAYOUT)
        acc = multiply_steps(ring, step, STEPS, acc, False, True, True)
        step += STEPS
        acc = finish_steps(ring, acc, step)
        gates, ups = split_columns(acc)
        gates, ups = split_columns(gates), split_columns(ups)
        m = rows_of(gates[0], first)
        s = _routing_weight(weights, choice, m, end)
        for part in gl.static_range(2):
            gate, up = gates[part], ups[part]
            column = n_tile * HALF + part * PART
            if z is not None:
                _stage(z, gate, staging, part, first, end, 0, column)
                _stage(z, up, staging, 1 - part, first, end, 1, column)
            _stage(h, gate / (1 + gl.exp(-gate)) * up * s[:, None], staging, part, first, end, 0, column)
    tma.store_wait(0)


@gluon.jit
def _stage(out, values, staging, which: gl.constexpr, first, end, half, column):
    """Store a tile through one of two buffers, once the store before the last one has read its buffer."""
    tma.store_wait(1)
    store_rows(out, values, staging.index(which), first, end, half, column)


@gluon.jit
def swiglu_up_kernel(
    x, index, w, weights, choice, z, h, tiles, STRIDE_X: gl.constexpr, F: gl.constexpr,
    D: gl.constexpr, X_LAYOUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = w.block_shape[1]
    x_buffers = gl.allocate_shared_memory(w.dtype, [STAGES, h.block_shape[2], w.block_shape[2]], X_LAYOUT)
    w_buffers = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    staging = gl.allocate_shared_memory(h.dtype, [2] + h.block_shape, h.layout)
    ring = create_ring(x_buffers, w_buffers, True)
    gl.warp_specialize([
        (_multiply_up_tiles, (z, h, weights, choice, staging, ring, tiles, F, D, GROUP_M)),
        (load_products, (x, index, w, ring, tiles, STRIDE_X, F, D, HALF, False, True, GROUP_M)),
    ], [4], [40])  # fmt: skip


def swiglu_up(
    x: Tensor, index: Tensor, gate_up: Tensor, z: Tensor | None, h: Tensor, tiling: Tiling, weights: Tensor | None,
    choice: Tensor, config: TileConfig, num_sms: int | None,
) -> None:  # fmt: skip
    """Fill z, if it is not None, and h as `swiglu_up` of the Triton kernels does."""
    num_experts, f, d = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    half, rows, columns = config.block_n // 2, config.block_m, config.block_n // 4
    grid = launch_grid(tiling.max_tiles(rows), f, half, config, num_sms, x.device)
    swiglu_up_kernel[grid](
        x, index, describe_weights(gate_up.view(2 * num_experts, f, d), (2, half, config.block_k)), weights, choice,
        None if z is None else ragged_rows(z, 2, rows, columns), ragged_rows(h, 1, rows, columns), tiling(rows),
        x.stride(0), f, d, layout_of((rows, config.block_k), x.dtype), config.stages,
        config.group_m, **register_options(config),
    )  # fmt: skip


# ---- backward of down ----


@gluon.jit
def _load_z(z, staging, arrived, SET: gl.constexpr, first, end, column):
    """Start to load gate and up of a part of a tile to the buffers of SET."""
    mbarrier.expect(arrived.index(SET), 2 * z.block_type.nbytes)
    for half in gl.static_range(2):
        coordinates = ragged_coordinates(first, end, half, column)
        tma.async_copy_global_to_shared(z, coordinates, arrived.index(SET), staging.index(3 * SET + half))


@gluon.jit
def _swiglu_backward(dh, s, gates, ups, hs):
    """Backward of `s * silu(gate) * up` for a few columns; returns the row sums of dh * h.

    It replaces gate and up, in shared memory, by their gradients, and writes s * h.
    """
    gate, up = gates.load(dh.type.layout).to(gl.float32), ups.load(dh.type.layout).to(gl.float32)
    sigmoid = 1 / (1 + gl.exp(-gate))
    silu = gate * sigmoid
    h = silu * up
    hs.store((h * s[:, None]).to(hs.dtype))
    total = gl.sum(dh * h, 1)
    dh *= s[:, None]
    ups.store((dh * silu).to(ups.dtype))
    gates.store((dh * (up * sigmoid + h * (1 - sigmoid))).to(gates.dtype))
    return total


@gluon.jit
def _finish_part(dh, dz, h, s, staging, SET: gl.constexpr, first, end, column):
    left, right = split_columns(dh)
    HALF: gl.constexpr = left.shape[1]
    gates = staging.index(3 * SET).reshape(dh.shape)
    ups = staging.index(3 * SET + 1).reshape(dh.shape)
    hs = staging.index(3 * SET + 2).reshape(dh.shape)
    total = _swiglu_backward(left, s, gates.slice(0, HALF, 1), ups.slice(0, HALF, 1), hs.slice(0, HALF, 1))
    total += _swiglu_backward(right, s, gates.slice(HALF, HALF, 1), ups.slice(HALF, HALF, 1), hs.slice(HALF, HALF, 1))
    fence_async_shared()
    tma.async_copy_shared_to_global(dz, ragged_coordinates(first, end, 0, column), staging.index(3 * SET))
    tma.async_copy_shared_to_global(dz, ragged_coordinates(first, end, 1, column), staging.index(3 * SET + 1))
    tma.async_copy_shared_to_global(h, ragged_coordinates(first, end, 0, column), staging.index(3 * SET + 2))
    return total


@gluon.jit
def _multiply_dh_tiles(
    z, dz, h, sums, weights, choice, staging, arrived, ring, turns, tiles, num_rows,
    WHO: gl.constexpr, F: gl.constexpr, D: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    """Consumer WHO: every second tile of the program."""
    BLOCK_M: gl.constexpr = z.block_shape[2]
    PART: gl.constexpr = z.block_shape[4]
    BLOCK_N: gl.constexpr = 4 * PART
    TILES_N: gl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    STEPS: gl.constexpr = (D + ring[0].shape[2] - 1) // ring[0].shape[2]
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row_tiles = gl.load(tiles)
    count = WHO
    for tile in range(gl.program_id(0) + WHO * gl.num_programs(0), row_tiles * TILES_N, 2 * gl.num_programs(0)):
        _, first, end, n_tile = locate_tile(tile, tiles, row_tiles, TILES_N, GROUP_M)
        column = n_tile * BLOCK_N
        tma.store_wait(0)  # of the last tile, from the same memory
        _load_z(z, staging, arrived, 2 * WHO, first, end, column)
        _load_z(z, staging, arrived, 2 * WHO + 1, first, end, column + PART)
        wait_for_turn(turns, count, WHO)
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, LAYOUT)
        acc = multiply_steps(ring, count * STEPS, STEPS, acc, False, False, True)
        pass_turn(turns, WHO)
        acc = finish_steps(ring, acc, (count + 1) * STEPS)
        left, right = split_columns(acc)
        dh_0, dh_1 = split_columns(left)
        dh_2, dh_3 = split_columns(right)
        dh = (dh_0, dh_1, dh_2, dh_3)
        m = rows_of(split_columns(dh_0)[0], first)
        s = _routing_weight(weights, choice, m, end)
        total = gl.zeros_like(s)
        for part in gl.static_range(4):
            set_of_part = 2 * WHO + part % 2
            mbarrier.wait(arrived.index(set_of_part), part // 2)
            total += _finish_part(dh[part], dz, h, s, staging, set_of_part, first, end, column + part * PART)
            if part < 2:
                tma.store_wait(0)
                _load_z(z, staging, arrived, set_of_part, first, end, column + (part + 2) * PART)
        if sums is not None:
            gl.store(sums + n_tile.to(gl.int64) * num_rows + m, total, mask=m < end)
        count += 2
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_rows"])
def swiglu_down_backward_kernel(
    dy, index, w, z, weights, choice, dz, h, sums, tiles, num_rows, STRIDE_DY: gl.constexpr,
    F: gl.constexpr, D: gl.constexpr, DY_LAYOUT: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
):  # fmt: skip
    BLOCK_N: gl.constexpr = w.block_shape[2]
    dy_buffers = gl.allocate_shared_memory(w.dtype, [STAGES, z.block_shape[2], w.block_shape[1]], DY_LAYOUT)
    w_buffers = gl.allocate_shared_memory(w.dtype, [STAGES] + w.block_shape, w.layout)
    # For each consumer, two sets of gate, up and h: the next part of z is loaded while this one is in use.
    staging = gl.allocate_shared_memory(z.dtype, [12] + z.block_shape, z.layout)
    arrived = create_barriers(4, 1)
    ring = create_ring(dy_buffers, w_buffers, True)
    turns = create_barriers(2, 1)
    gl.warp_specialize([
        (_multiply_dh_tiles, (z, dz, h, sums, weights, choice, staging, arrived, ring, turns, tiles,
                              num_rows, 0, F, D, GROUP_M)),
        (_multiply_dh_tiles, (z, dz, h, sums, weights, choice, staging, arrived, ring, turns, tiles,
                              num_rows, 1, F, D, GROUP_M)),
        (load_products, (dy, index, w, ring, tiles, STRIDE_DY, F, D, BLOCK_N, True, False, GROUP_M)),
    ], [4, 4], [232, 40])  # fmt: skip


def swiglu_down_backward(
    dy: Tensor, index: Tensor, down: Tensor, z: Tensor, dz: Tensor, h: Tensor, sums: Tensor | None, tiling: Tiling,
    weights: Tensor | None, choice: Tensor, config: TileConfig, num_sms: int | None,
) -> None:  # fmt: skip
    """Fill dz, h and sums (None without weights) as `swiglu_down_backward` of the Triton kernels does."""
    d, f = down.shape[1:]
    rows, part = config.block_m, config.block_n // 4
    grid = launch_grid(tiling.max_tiles(rows), f, config.block_n, config, num_sms, dy.device)
    swiglu_down_backward_kernel[grid](
        dy, index, describe_weights(down, (1, config.block_k, config.block_n)), ragged_rows(z, 2, rows, part), weights,
        choice, ragged_rows(dz, 2, rows, part), ragged_rows(h, 1, rows, part), sums, tiling(rows),
        len(z), dy.stride(0), f, d, layout_of((rows, config.block_k), dy.dtype), config.stages, config.group_m,
        **register_options(config),
    )  # fmt: skip
