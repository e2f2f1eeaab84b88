"""Tensors as arguments of kernels that move tiles through the tensor memory accelerator (TMA) of Hopper and newer GPUs.

A descriptor tells the TMA the address, shape and strides of a tensor, and the box that one instruction moves. Elements
out of bounds are read as zeros and are not written. Where TMA cannot be used, kernels take the plain tensor instead.

E experts, M rows in expert-major order.
"""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .configs import TileConfig


def uses_tma(config: TileConfig, *tensors: Tensor) -> bool:
    """Whether TMA moves all these tensors. It needs rows aligned to 16 bytes, and their number to fit in 30 bits."""
    return config.tma and all(
        t.numel() and t.data_ptr() % 16 == 0 and t.stride(-2) * t.element_size() % 16 == 0
        and t.stride(-2) >= t.shape[-1] and t.shape[-2] <= 2**30
        for t in tensors
    )  # fmt: skip


def weights_argument(w: Tensor, box: tuple[int, int, int], tma: bool) -> Tensor | TensorDescriptor:
    """[E, rows, columns] as a kernel argument: a TMA descriptor that moves `box` at a time, or the plain tensor.

    Raises ValueError for a matrix of 2^31 elements or more: kernels compute offsets inside a matrix in 32 bits.
    """
    if w.shape[1] * w.shape[2] >= 2**31:
        raise ValueError(f"the matrix of an expert must have fewer than 2^31 elements: got {w.shape[1]} x {w.shape[2]}")
    if not tma:
        return w
    return TensorDescriptor(w, [*w.shape], weight_strides(w), [*box])


def weight_strides(w: Tensor) -> list[int]:
    """The strides of contiguous weights [E, rows, columns].

    Not w.stride(): the stride of a dimension of size 1 is arbitrary, and a descriptor needs multiples of 16 bytes.
    """
    return [w.shape[1] * w.shape[2], w.shape[2], 1]


def rows_argument(a: Tensor, box: tuple[int, int], tma: bool) -> Tensor | TensorDescriptor:
    """[M, columns] as a kernel argument: a TMA descriptor that moves `box` at a time, or the plain tensor."""
    return TensorDescriptor(a, [*a.shape], [a.stride(0), 1], [*box]) if tma else a


def ragged_argument(a: Tensor, box: tuple[int, int], tma: bool) -> Tensor | TensorDescriptor:
    """Like `rows_argument`, for `load_ragged` and `store_ragged`, which do not touch the rows of the next expert."""
    if not tma:
        return a
    shape, strides = ragged_dimensions(a)
    return TensorDescriptor(a, [*shape, a.shape[1]], [*strides, 1], [1, 1, *box])


def ragged_dimensions(a: Tensor) -> tuple[list[int], list[int]]:
    """Sizes and strides of the three dimensions that replace the rows of `a`, so that a box may end at any row.

    TMA only checks bounds of whole tensors. So rows have an index x below 2^30, and the rows of an expert are the last
    ones below 2^30. Two more dimensions subtract 2^30 rows and add the end of the expert: they compute the address
    2^30 (2^34 - stride) + end stride + x stride modulo 2^64. This is the trick of triton.tools.ragged_tma.
    Coordinates: (2^30, end, 2^30 - end + first) for the rows from `first` to `end`.
    """
    stride, most = a.stride(0), 0x7FFF0000
    return [most, most, 2**30], [2**34 - stride, stride, stride]
