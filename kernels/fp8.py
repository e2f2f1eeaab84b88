"""FP8: matrices in 8 bits (e4m3), with a scale for each block of numbers, after DeepSeek-V3.

    scale = max |x| of a block / 448            448 is the largest number in e4m3
    stored = x / scale, rounded to e4m3         so x is about stored * scale

A small number beside a large one in its block loses digits; a large number in another block costs it nothing. So blocks
are small, and a row's scales depend on no other row. Products sum over the dimension along which blocks are long, and
multiply each block's sum by its scales.

    recipe    activations   weights      scales                         source
    fp32      1 x 128       128 x 128    any fp32 number                DeepSeek-V3 (arXiv 2412.19437, section 3.3)
    ue8m0     1 x 128       128 x 128    powers of two, rounded up      DeepSeek-V3.1
    mxfp8     1 x 32        1 x 32       powers of two, rounded up      OCP MX, with the rounding of arXiv 2506.08027

With powers of two, what is read back is exact in bf16, and rounding it again changes nothing.

R rows, C columns, B blocks of columns; ...: any leading dimensions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0
_LEAST_EXPONENT = -126  # of a normal fp32 number


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """stored: [..., R, C] in e4m3. scales: [..., ceil(R / rows), ceil(C / columns)] in fp32, one for each block."""

    stored: Tensor
    scales: Tensor
    rows: int
    columns: int

    def read(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The numbers that are stored, [..., R, C], rounded once to `dtype`."""
        R, C = self.stored.shape[-2:]
        blocks = _blocks(self.stored.to(torch.promote_types(dtype, torch.float32)), self.rows, self.columns)
        blocks = blocks * self.scales[..., :, None, :, None]
        return blocks.flatten(-2).flatten(-3, -2)[..., :R, :C].to(dtype)

    @property
    def exponents(self) -> Tensor:
        """The scales, if they are powers of two, in UE8M0: as bytes, 127 for 1 and 255 for NaN."""
        return (self.scales.view(torch.int32) >> 23).to(torch.uint8)

    def take(self, index_M: Tensor) -> "Fp8Matrix":
        """The rows `index_M` of [R, C]. Each row must have its own scales."""
        assert self.rows == 1
        stored = self.stored.view(torch.uint8).index_select(0, index_M).view(DTYPE)  # no index_select for e4m3 on CPUs
        return Fp8Matrix(stored, self.scales.index_select(0, index_M), 1, self.columns)


def quantize(x: Tensor, rows: int, columns: int, power_of_two: bool) -> Fp8Matrix:
    """Round [..., R, C] to e4m3, with a scale for each block of `rows` x `columns`. Blocks at the ends may be smaller.

    power_of_two: round scales up to a power of two. A block of zeros has scale 1; one with NaN or infinity becomes NaN.
    """
    R, C = x.shape[-2:]
    x = x.detach().to(torch.promote_types(x.dtype, torch.float32))
    blocks = _blocks(x, rows, columns)
    largest = blocks.abs().amax((-3, -1))
    # CUDA divides by a number as it multiplies by its reciprocal, which has other bits.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp(min=2.0**_LEAST_EXPONENT)
    if power_of_two:
        mantissa, exponent = torch.frexp(scales)  # mantissa in [0.5, 1)
        scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    scales = torch.where(largest > 0, scales, 1.0)
    scales = torch.where(largest.isfinite(), scales, torch.nan)
    stored = (blocks / scales[..., :, None, :, None]).to(DTYPE)
    stored = stored.view(torch.uint8).flatten(-2).flatten(-3, -2)[..., :R, :C].contiguous().view(DTYPE)
    return Fp8Matrix(stored, scales.float(), rows, columns)


def _blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """[..., R, C], filled up with zeros, as [..., R / rows, rows, C / columns, columns]."""
    R, C = x.shape[-2:]
    padded = functional.pad(x, (0, -C % columns, 0, -R % rows))
    return padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))


@dataclass(frozen=True, slots=True)
class Fp8Recipe:
    """Which numbers share a scale. block: of a row, along the dimension that products sum over. weight_rows: rows of a
    weight. power_of_two: scales are rounded up to powers of two."""

    block: int = 128
    weight_rows: int = 128
    power_of_two: bool = True

    def quantize_rows(self, x_RC: Tensor) -> Fp8Matrix:
        """Activations or gradients, each row with its own scales."""
        return quantize(x_RC, 1, self.block, self.power_of_two)

    def quantize_weights(self, w_EOI: Tensor) -> Fp8Matrix:
        """The weights of all experts for a product that sums over I; pass `w_EOI.mT` for one that sums over O."""
        rounded = partial(quantize, w_EOI, self.weight_rows, self.block, self.power_of_two)
        given = w_EOI if w_EOI._base is None else w_EOI._base
        if _kept is None or not given.is_leaf:  # a tensor computed from weights is used only once
            return rounded()
        key = self, w_EOI.data_ptr(), w_EOI.shape, w_EOI.stride(), w_EOI.dtype
        if key not in _kept:
            _kept[key] = w_EOI, rounded()  # holds the weights, so that no others get their address
        return _kept[key][1]

    def kernels_fault(self, device: torch.device) -> str:
        """Why Triton cannot multiply with this recipe on `device`; "" if it can."""
        if device.type != "cuda":
            return ""
        major = 0 if torch.version.hip else torch.cuda.get_device_capability(device)[0]
        if major >= (10 if self.block == 32 else 9):
            return ""
        others = "use the recipe ue8m0 or fp32" if major == 9 else "use compute.fp8=off"
        return f"needs NVIDIA's {'Blackwell' if self.block == 32 else 'Hopper'} or a later GPU for Triton: {others}"


_kept: dict[Any, tuple[Tensor, Fp8Matrix]] | None = None


@contextmanager
def weights_unchanged() -> Iterator[None]:
    """Inside, weights do not change, so each is rounded once per layout: the micro-batches of a step share the result.

    In-place changes inside would go unnoticed.
    """
    global _kept
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


RECIPES = {"ue8m0": Fp8Recipe(), "fp32": Fp8Recipe(power_of_two=False), "mxfp8": Fp8Recipe(32, 1)}
