"""FP8 in Triton: round rows to e4m3, multiply rows and weights in this format (fp8.py), and SwiGLU between products.

    y[m] = sum over blocks b of 128 columns:  scale_a[m, b] scale_w[e, n // 128, b] (a8[m, b] . w8[e, n, b])

The tensor cores of Hopper add up products of 8-bit numbers with only 14 bits. So the sum of each block is added to an
fp32 accumulator, as in DeepGEMM: the error of 14 bits does not grow with the length of a sum. For MX, with a scale for
each 32 numbers of a row and of a weight, the tensor cores of Blackwell multiply by the scales themselves. All weights
are read along the dimension that is summed over; for input gradients, they are rounded and stored once more,
transposed.

M rows in expert-major order, E experts, N columns of a product, K length of the sum, B blocks of K.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from ..fp8 import Fp8Matrix
from .configs import lookup
from .descriptors import uses_tma, weights_argument
from .launch_args import arch_of, ceil_div, launch_grid, launch_settings
from .swiglu import routing_weight, swiglu_gradients
from .tiles import Tiling, load_weight_tile, locate_tile, store_tile, tile_rows

BLOCK = tl.constexpr(128)
"""Columns of a step of a product. Except for MX, also the numbers of a row with one scale."""
MX_BLOCK = tl.constexpr(32)
LARGEST = tl.constexpr(448.0)
E4M3 = tl.constexpr("e4m3")
ROWS = 16  # of a block that one program rounds


@triton.jit
def block_scale(x, POWER_OF_TWO: tl.constexpr):
    """The scale of each row of a block: as `quantize` computes it."""
    largest = tl.max(tl.abs(x), 1)
    scale = tl.maximum(tl.div_rn(largest, LARGEST), 1.1754943508222875e-38)  # `/` is not exact on a GPU
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFF) != 0, (bits & 0x7F800000) + 0x800000, bits)
        scale = bits.to(tl.float32, bitcast=True)
    scale = tl.where(largest > 0, scale, 1.0)
    # Comparisons with NaN are false. tl.max may drop NaN: the sum keeps it.
    finite = tl.sum(x * 0.0, 1) == 0.0
    return tl.where(finite, scale, float("nan"))


@triton.jit(do_not_specialize=["num_rows"])
def quantize_rows_kernel(
    x, stored, scales, num_rows, STRIDE_X: tl.constexpr, C: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = (C + COLUMNS - 1) // COLUMNS
    m = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    b = tl.program_id(1)
    c = b * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < num_rows)[:, None] & (c < C)[None, :]
    block = tl.load(x + m[:, None] * STRIDE_X + c[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = block_scale(block, POWER_OF_TWO)
    tl.store(stored + m[:, None] * C + c[None, :], tl.div_rn(block, scale[:, None]).to(tl.float8e4nv), mask=inside)
    tl.store(scales + m * B + b, scale, mask=m < num_rows)


def quantize_rows(x: Tensor, block: int, power_of_two: bool) -> Fp8Matrix:
    """Round [M, C], with a scale for each `block` of a row."""
    rounded, grid = _empty(*x.shape, block, x.device)
    if len(x):
        quantize_rows_kernel[grid](
            x, rounded.stored, rounded.scales, len(x), x.stride(0), x.shape[1], power_of_two, ROWS, block
        )  # fmt: skip
    return rounded


def _words(exponents: Tensor) -> Tensor:
    """The four exponents of each step of a product, in one int32."""
    return functional.pad(exponents, (0, -exponents.shape[-1] % 4)).view(torch.int32)


def _empty(num_rows: int, columns: int, block: int, device: torch.device) -> tuple[Fp8Matrix, tuple[int, int]]:
    """Memory for rounded rows, and the grid of a kernel that writes it."""
    blocks = ceil_div(columns, block)
    stored = torch.empty(num_rows, columns, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(num_rows, blocks, dtype=torch.float32, device=device)
    return Fp8Matrix(stored, scales, 1, block), (ceil_div(num_rows, ROWS), blocks)


@triton.jit
def _bytes(words):
    """The four bytes of each word, [ROWS, 4]."""
    return (words[:, None] >> (tl.arange(0, 4) * 8)[None, :]).to(tl.uint8)


@triton.jit
def fp8_rows_times_weights_kernel(
    a, a_scales, index, w, w_scales, out, tiles, N: tl.constexpr, K: tl.constexpr, MX: tl.constexpr,
    GATHER: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    tl.static_assert(BLOCK_K == BLOCK and BLOCK % BLOCK_N == 0, "a tile of weights is inside a block, or MX")
    TILES_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    BLOCKS_N: tl.constexpr = N if MX else (N + BLOCK - 1) // BLOCK
    count = tl.load(tiles)
    for tile in range(tl.program_id(0), count * TILES_N, tl.num_programs(0)):
        e, first, end, n_tile = locate_tile(tile, tiles, count, TILES_N, GROUP_M)
        rows = tile_rows(index, first, end, GATHER, BLOCK_M)
        n0 = n_tile * BLOCK_N
        scales_of_w = w_scales + (e.to(tl.int64) * BLOCKS_N + (n0 if MX else n0 // BLOCK)) * STEPS
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in range(STEPS):
            k = step * BLOCK + tl.arange(0, BLOCK_K)
            pointers = a + (rows * K)[:, None] + k[None, :]
            if K % BLOCK_K == 0:
                a_tile = tl.load(pointers)
            else:
                a_tile = tl.load(pointers, mask=(k < K)[None, :], other=0.0)
            b_tile = load_weight_tile(w, e, n0, step * BLOCK, N, K, False, False, TMA, BLOCK_N, BLOCK_K)
            if MX:
                n = tl.arange(0, BLOCK_N)
                of_a = _bytes(tl.load(a_scales + rows * STEPS + step))
                of_w = _bytes(tl.load(scales_of_w + n * STEPS + step, mask=n0 + n < N, other=0))
                acc = tl.dot_scaled(a_tile, of_a, E4M3, b_tile, of_w, E4M3, acc)
            else:
                scale = tl.load(a_scales + rows * STEPS + step) * tl.load(scales_of_w + step)
                acc += tl.dot(a_tile, b_tile, input_precision=PRECISION) * scale[:, None]
        m = first + tl.arange(0, BLOCK_M)
        store_tile(out, acc, m, n0, end, N, N, BLOCK_N, BLOCK_N)


def fp8_rows_times_weights(
    a: Fp8Matrix, w: Fp8Matrix, tiling: Tiling, dtype: torch.dtype, index: Tensor | None = None,
    num_sms: int | None = None,
) -> Tensor:  # fmt: skip
    """Return y [M, N] in `dtype`, with y[m] = W[e] a[m].

    a: [M, K], or [., K] with index [M], the row of a for each m. w: [E, N, K]. Blocks: of a, 1 x 128, and of w,
    128 x 128; for MX, 1 x 32 of both.
    """
    mx, (n, k) = a.columns == MX_BLOCK.value, w.stored.shape[1:]
    scales = [_words(each.exponents) if mx else each.scales for each in (a, w)]
    device = a.stored.device
    config = lookup("fp8", arch_of(device), 1, n, k, tiling.num_rows // len(w.stored))
    out = torch.empty(tiling.num_rows, n, dtype=dtype, device=device)
    if tiling.num_rows:
        tma, box = uses_tma(config, w.stored), (1, config.block_n, config.block_k)
        grid = launch_grid(tiling.max_tiles(config.block_m), n, config.block_n, config, num_sms, device)
        fp8_rows_times_weights_kernel[grid](
            a.stored, scales[0], index, weights_argument(w.stored, box, tma), scales[1], out, tiling(config.block_m),
            n, k, MX=mx, GATHER=index is not None, **launch_settings(config, w.stored, tma),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_round_kernel(
    z, weights, choice, stored, scales, num_rows, F: tl.constexpr, WEIGHTED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    B: tl.constexpr = (F + COLUMNS - 1) // COLUMNS
    m, b = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    f = b * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < num_rows)[:, None] & (f < F)[None, :]
    pointers = z + m.to(tl.int64)[:, None] * (2 * F) + f[None, :]
    gate = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(pointers + F, mask=inside, other=0.0).to(tl.float32)
    h = gate * tl.sigmoid(gate) * up * routing_weight(weights, choice, m, num_rows, WEIGHTED, ROWS)[:, None]
    scale = block_scale(h, POWER_OF_TWO)
    rounded = tl.div_rn(h, scale[:, None]).to(tl.float8e4nv)
    tl.store(stored + m.to(tl.int64)[:, None] * F + f[None, :], rounded, mask=inside)
    tl.store(scales + m.to(tl.int64) * B + b, scale, mask=m < num_rows)


def swiglu_round(
    z: Tensor, weights: Tensor | None, choice: Tensor, block: int, power_of_two: bool
) -> Fp8Matrix:  # fmt: skip
    """silu(gate) * up for z [M, 2F], times weights.flatten()[choice[m]], rounded as in `quantize_rows`."""
    num_rows, width = len(z), z.shape[1] // 2
    rounded, grid = _empty(num_rows, width, block, z.device)
    if num_rows:
        swiglu_round_kernel[grid](
            z, weights, choice, rounded.stored, rounded.scales, num_rows, width, weights is not None, power_of_two,
            ROWS, block,
        )  # fmt: skip
    return rounded


@triton.jit(do_not_specialize=["num_rows"])
def swiglu_backward_kernel(
    dh, z, weights, choice, dz, h, sums, num_rows, F: tl.constexpr, WEIGHTED: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    m, b = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    f = b * COLUMNS + tl.arange(0, COLUMNS)
    inside = (m < num_rows)[:, None] & (f < F)[None, :]
    dh_block = tl.load(dh + m.to(tl.int64)[:, None] * F + f[None, :], mask=inside, other=0.0)
    s = routing_weight(weights, choice, m, num_rows, WEIGHTED, ROWS)
    total = swiglu_gradients(dh_block, z, dz, h, s, m, b * COLUMNS, num_rows, F, COLUMNS, COLUMNS)
    if WEIGHTED:
        tl.store(sums + b.to(tl.int64) * num_rows + m, total, mask=m < num_rows)


def swiglu_backward(
    dh: Tensor, z: Tensor, weights: Tensor | None, choice: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """From dh [M, F] in fp32, return what `swiglu_down_backward` (swiglu.py) returns."""
    num_rows, width = dh.shape
    blocks = ceil_div(width, BLOCK.value)
    dz, h = torch.empty_like(z), z.new_empty(num_rows, width)
    sums = torch.empty(blocks, num_rows, dtype=torch.float32, device=z.device) if weights is not None else None
    if num_rows:
        swiglu_backward_kernel[(ceil_div(num_rows, ROWS), blocks)](
            dh, z, weights, choice, dz, h, sums, num_rows, width, weights is not None, ROWS, BLOCK.value
        )
    return dz, h, sums
