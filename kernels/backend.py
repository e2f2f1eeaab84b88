"""Which implementation runs an operator: the Triton kernels, or plain torch.

A model is built with `kernels="auto"`, `"triton"` or `"reference"` and passes that on. "auto" is Triton for tensors on
a GPU, in the dtypes that its kernels know, and plain torch for all others; "triton" refuses what it cannot do.
"""

import functools
import importlib.util
from typing import Literal, get_args

import torch
from torch import Tensor

Kernels = Literal["auto", "triton", "reference"]

_KNOWN = (torch.bfloat16, torch.float16, torch.float32)


def validate_kernels(kernels: str) -> Kernels:
    """`kernels`, if there is such a choice and it can be had here. Raises ValueError otherwise."""
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels must be one of {', '.join(get_args(Kernels))}: got {kernels!r}")
    if kernels == "triton" and not _has_triton():
        raise ValueError('kernels="triton" needs the triton package, which is not installed: use kernels="reference"')
    return kernels  # type: ignore[return-value]


def use_triton(kernels: Kernels, *tensors: Tensor | None) -> bool:
    """Whether Triton is to compute on these tensors, of which the first one's dtype must be one that kernels know.

    Raises ValueError where "triton" was asked for and cannot be: an unknown dtype, or tensors on a CPU (unless Triton
    interprets), or tensors on another GPU than the current one, where kernels would run; and in any case for tensors on
    different devices.
    """
    first, *others = (t for t in tensors if t is not None)
    for other in others:
        if other.device != first.device:
            raise ValueError(f"all tensors must be on one device: got {first.device} and {other.device}")
    if validate_kernels(kernels) == "reference":
        return False
    fits = first.dtype in _KNOWN or not (first.is_floating_point() or first.is_complex())
    if kernels == "auto" and not (first.is_cuda and fits and _has_triton()):
        return False
    if first.is_cuda and first.device.index != torch.cuda.current_device():
        raise ValueError(
            f"Triton launches kernels on the current GPU, cuda:{torch.cuda.current_device()}, but these tensors are on "
            f"{first.device}: call torch.cuda.set_device({first.device.index}) first"
        )
    if kernels == "auto":
        return True
    if not fits:
        raise ValueError(f'kernels="triton" knows bfloat16, float16 and float32: got {first.dtype}')
    from .gpu.device import interpreter_enabled

    if interpreter_enabled() and first.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter computes wrong numbers in bfloat16: use float16 or float32 there")
    if not (first.is_cuda or interpreter_enabled()):
        raise ValueError(
            f'kernels="triton" needs tensors on a GPU, or TRITON_INTERPRET=1 to be set before triton is imported: '
            f'got {first.device}; kernels="auto" uses plain torch there'
        )
    return True


def forbid_double_backward() -> None:
    """Raises RuntimeError in a backward that autograd is to go through once more: kernels would leave no trace."""
    if torch.is_grad_enabled():
        raise RuntimeError('the Triton kernels have no gradients of gradients (create_graph): use kernels="reference"')


def check_contiguous_rows(name: str, x: Tensor) -> Tensor:
    """`x`, if a kernel can read it: [rows, columns] with the columns side by side. Raises ValueError otherwise."""
    if x.ndim != 2 or (x.stride(1) != 1 and x.shape[1] > 1 and len(x)):
        raise ValueError(
            f"{name} must be [rows, columns] with contiguous rows: got {[*x.shape]} with strides {x.stride()}"
        )
    return x


def check_contiguous(name: str, x: Tensor) -> Tensor:
    """`x`, if it is contiguous. Raises ValueError otherwise."""
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous: got {[*x.shape]} with strides {x.stride()}")
    return x


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
