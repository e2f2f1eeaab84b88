"""The two products of a SwiGLU expert that are fused with SwiGLU: it is applied while the tile is in registers.

    swiglu_up              z[m] = W1[e] x[m] = [gate; up];   h[m] = silu(gate) * up, optionally weighted
    swiglu_down_backward   dh[m] = W2[e]^T dy[m]; then from z: the gradients of gate and up, the weighted h (needed for
                           the weight gradient of W2), and <dh, h>, the gradient of the routing weight

Only z is saved for backward. h is recomputed, and the experts' outputs are not needed.

M rows in expert-major order, E experts, D model dim, F inner width; W1 = gate_up, W2 = down.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .configs import lookup
from .descriptors import uses_tma, weights_argument
from .launch_args import arch_of, ceil_div, launch_grid, launch_settings
from .tiles import Tiling, locate_tile, split_columns, split_in_four, store_tile, tile_product, tile_rows


@triton.jit
def routing_weight(weights, choice, m, end, WEIGHTED: tl.constexpr, BLOCK_M: tl.constexpr):
    """The routing weight of each row, or 1 if the kernel has no weights."""
    if WEIGHTED:
        inside = m < end
        s = tl.load(weights + tl.load(choice + m, mask=inside, other=0), mask=inside, other=0.0)
    else:
        s = tl.full((BLOCK_M,), 1.0, tl.float32)
    return s


@triton.jit
def swiglu_up_kernel(
    x, index, w, weights, choice, z, h, tiles, STRIDE_X: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
    STORE_Z: tl.constexpr, WEIGHTED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = BLOCK_N // 2
    TILES_N: tl.constexpr = (F + HALF - 1) // HALF
    count = tl.load(tiles)
    for tile in range(tl.program_id(0), count * TILES_N, tl.num_programs(0)):
        e, first, end, n_tile = locate_tile(tile, tiles, count, TILES_N, GROUP_M)
        x_rows = tile_rows(index, first, end, True, BLOCK_M) * STRIDE_X
        n0 = n_tile * HALF
        acc = tile_product(x, x_rows, w, e, n0, F, D, False, True, False, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
        gate, up = split_columns(acc, BLOCK_M, BLOCK_N)
        m = first + tl.arange(0, BLOCK_M)
        if STORE_Z:
            store_tile(z, gate, m, n0, end, 2 * F, F, HALF, HALF)
            store_tile(z + F, up, m, n0, end, 2 * F, F, HALF, HALF)
        s = routing_weight(weights, choice, m, end, WEIGHTED, BLOCK_M)
        store_tile(h, gate * tl.sigmoid(gate) * up * s[:, None], m, n0, end, F, F, HALF, HALF)


def swiglu_up(
    x: Tensor, index: Tensor, gate_up: Tensor, tiling: Tiling, weights: Tensor | None, choice: Tensor,
    store_z: bool = True, num_sms: int | None = None,
) -> tuple[Tensor | None, Tensor]:  # fmt: skip
    """Return z [M, 2F], or None without store_z, and h [M, F], from x [., D] and gate_up [E, 2F, D].

    index: [M], the row of x for each m. weights: fp32 or None; row m of h is times weights.flatten()[choice[m]].
    """
    num_experts, f, d = gate_up.shape[0], gate_up.shape[1] // 2, gate_up.shape[2]
    config = lookup("up", arch_of(x.device), x.element_size(), f, d, tiling.num_rows // num_experts)
    halves = gate_up.view(2 * num_experts, f, d)
    z = x.new_empty(tiling.num_rows, 2 * f) if store_z else None
    h = x.new_empty(tiling.num_rows, f)
    if tiling.num_rows:
        tma, box = uses_tma(config, halves), (2, config.block_n // 2, config.block_k)
        grid = launch_grid(tiling.max_tiles(config.block_m), f, config.block_n // 2, config, num_sms, x.device)
        swiglu_up_kernel[grid](
            x, index, weights_argument(halves, box, tma), weights, choice, z, h,
            tiling(config.block_m), x.stride(0), f, d, STORE_Z=store_z, WEIGHTED=weights is not None,
            **launch_settings(config, halves, tma),
        )  # fmt: skip
    return z, h


@triton.jit
def swiglu_gradients(
    dh, z, dz, h, s, m, n0, end, F: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Backward of `s * silu(gate) * up` for a part of a tile. Stores dz and s * h; returns the row sums of dh * h."""
    n = n0 + tl.arange(0, COLUMNS)
    inside = (m < end)[:, None] & (n < F)[None, :]
    pointers = z + m.to(tl.int64)[:, None] * (2 * F) + n[None, :]
    gate = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pointers + F, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    weighted = dh * s[:, None]
    store_tile(dz, weighted * up * (sigmoid + silu * (1 - sigmoid)), m, n0, end, 2 * F, F, COLUMNS, TILE)
    store_tile(dz + F, weighted * silu, m, n0, end, 2 * F, F, COLUMNS, TILE)
    store_tile(h, silu * up * s[:, None], m, n0, end, F, F, COLUMNS, TILE)
    return tl.sum(dh * silu * up, 1)


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_down_backward_kernel(
    dy, index, w, z, weights, choice, dz, h, sums, tiles, num_rows, STRIDE_DY: tl.constexpr,
    F: tl.constexpr, D: tl.constexpr, WEIGHTED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    TILES_N: tl.constexpr = (F + BLOCK_N - 1) // BLOCK_N
    QUARTER: tl.constexpr = BLOCK_N // 4
    count = tl.load(tiles)
    for tile in range(tl.program_id(0), count * TILES_N, tl.num_programs(0)):
        e, first, end, n_tile = locate_tile(tile, tiles, count, TILES_N, GROUP_M)
        dy_rows = tile_rows(index, first, end, True, BLOCK_M) * STRIDE_DY
        n0 = n_tile * BLOCK_N
        acc = tile_product(dy, dy_rows, w, e, n0, F, D, True, False, False, TMA, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K)
        m = first + tl.arange(0, BLOCK_M)
        s = routing_weight(weights, choice, m, end, WEIGHTED, BLOCK_M)
        # In four parts: gate, up and their gradients for the whole tile would spill registers.
        dh0, dh1, dh2, dh3 = split_in_four(acc, BLOCK_M, BLOCK_N)
        total = swiglu_gradients(dh0, z, dz, h, s, m, n0, end, F, QUARTER, BLOCK_N)
        total += swiglu_gradients(dh1, z, dz, h, s, m, n0 + QUARTER, end, F, QUARTER, BLOCK_N)
        total += swiglu_gradients(dh2, z, dz, h, s, m, n0 + 2 * QUARTER, end, F, QUARTER, BLOCK_N)
        total += swiglu_gradients(dh3, z, dz, h, s, m, n0 + 3 * QUARTER, end, F, QUARTER, BLOCK_N)
        if WEIGHTED:
            tl.store(sums + n_tile.to(tl.int64) * num_rows + m, total, mask=m < end)


def swiglu_down_backward(
    dy: Tensor, index: Tensor, down: Tensor, z: Tensor, tiling: Tiling, weights: Tensor | None, choice: Tensor,
    num_sms: int | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Return dz [M, 2F], the weighted h [M, F], and partial sums [column tiles, M] in fp32 (None without weights).

    The sum over column tiles is the gradient of each row's routing weight. dy: [., D], the gradient of the layer's
    output; index: [M], the row of dy for each m. down: [E, D, F].
    """
    d, f = down.shape[1:]
    config = lookup("down_backward", arch_of(dy.device), dy.element_size(), f, d, tiling.num_rows // len(down))
    num_rows, tiles_n = tiling.num_rows, ceil_div(f, config.block_n)
    dz, h = torch.empty_like(z), z.new_empty(num_rows, f)
    sums = torch.empty(tiles_n, num_rows, dtype=torch.float32, device=z.device) if weights is not None else None
    if num_rows:
        tma, box = uses_tma(config, down), (1, config.block_k, config.block_n)
        grid = launch_grid(tiling.max_tiles(config.block_m), f, config.block_n, config, num_sms, dy.device)
        swiglu_down_backward_kernel[grid](
            dy, index, weights_argument(down, box, tma), z, weights, choice, dz, h, sums,
            tiling(config.block_m), num_rows, dy.stride(0), f, d, WEIGHTED=weights is not None,
            **launch_settings(config, down, tma),
        )  # fmt: skip
    return dz, h, sums
