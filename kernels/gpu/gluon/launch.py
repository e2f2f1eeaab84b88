"""What the launchers of Gluon kernels share: descriptors of tensors, grids and compile options."""

from collections.abc import Sequence
from typing import Any

import torch
import triton.experimental.gluon.language as gl
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..configs import TileConfig
from ..descriptors import ragged_dimensions, weight_strides

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
    return _describe(w, w.shape, weight_strides(w), box)


def ragged_rows(t: Tensor, halves: int, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of t [M, halves x C] as [M, halves, C], for tiles that end at any row.

    The first three coordinates are those of `ragged_dimensions`; half and column follow.
    """
    (shape, strides), width = ragged_dimensions(t), t.shape[1] // halves
    return _describe(t, (*shape, halves, width), (*strides, width, 1), (1, 1, rows, 1, columns))


def register_options(config: TileConfig) -> dict[str, Any]:
    """Compile options. Three warpgroups share the registers; then the producer gives most of its own to the others."""
    return {"num_warps": config.warps, "maxnreg": 168}
