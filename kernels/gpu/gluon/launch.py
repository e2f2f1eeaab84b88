"""What the launchers of Gluon kernels share: descriptors of tensors, grids and compile options."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..configs import TileConfig

_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


def layout_of(box: Sequence[int], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """The layout in shared memory of a tile that TMA copies and wgmma reads."""
    return gl.NVMMASharedLayout.get_default_for([*box], _DTYPES[dtype])


def _describe(t: Tensor, shape: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> TensorDescriptor:
    return TensorDescriptor(t, [*shape], [*strides], [*box], layout_of(box, t.dtype))


def describe_rows(a: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of a [M, K] for tiles [rows, columns]."""
    return _describe(a, a.shape, (a.stride(0), 1), (rows, columns))


def describe_weights(w: Tensor, box: Sequence[int]) -> TensorDescriptor:
    """A descriptor of contiguous weights [E, N, K]."""
    _, rows, columns = w.shape
    # Not w.stride(): the stride of a dimension of size 1 is arbitrary, and a descriptor needs multiples of 16 bytes.
    return _describe(w, w.shape, (rows * columns, columns, 1), box)


def ragged_rows(t: Tensor, halves: int, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of t [M, halves x C] as [M, halves, C], for tiles that end at any row.

    Coordinates (2^30, end, 2^30 - (end - first), half, column) are the tile that starts at row `first`; its rows from
    `end` on are outside the third dimension. Addresses are right because they wrap at 2^64 bytes. This is the method of
    triton.tools.ragged_tma.
    """
    stride, columns_of_half = t.stride(0), t.shape[1] // halves
    large = 0x7FFF0000
    strides = (2**34 - stride, stride, stride, columns_of_half, 1)
    return _describe(t, (large, large, 2**30, halves, columns_of_half), strides, (1, 1, rows, 1, columns))


def register_options(config: TileConfig) -> dict[str, Any]:
    """Compile options. Three warpgroups share the registers; then the producer gives most of its own to the others."""
    return {"num_warps": config.warps, "maxnreg": 168}
