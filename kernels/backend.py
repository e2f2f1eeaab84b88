"""Choose the implementation of an operator: Triton kernels or plain torch.

A model is built with `kernels="auto"`, `"triton"` or `"reference"` and passes the choice to its layers. "auto" uses
Triton for tensors on a GPU in a dtype that the kernels support, and plain torch otherwise. "triton" raises an error
where "auto" uses plain torch. "reference" always uses plain torch.
"""

import warnings

import torch
from torch import Tensor

from .fuse import is_traced
from .options import Kernels, has_triton, validate_kernels

ALIGNMENT = 16  # bytes: of wide loads and TMA, and what Triton compiles a kernel for

_SUPPORTED = (torch.bfloat16, torch.float16, torch.float32)
_copied: set[str] = set()  # names of the tensors that the user was warned about


def use_triton(kernels: Kernels, *tensors: Tensor | None) -> bool:
    """Whether to run the Triton kernels on these tensors. Only the first tensor's dtype is checked.

    Raises ValueError if the tensors are on different devices, or on a GPU that is not the current one. With "triton",
    also raises ValueError for an unsupported dtype, and for CPU tensors unless Triton's interpreter is enabled.
    """
    first = next(t for t in tensors if t is not None)
    for other in tensors:
        if other is not None and other.device != first.device:
            raise ValueError(f"all tensors must be on one device: got {first.device} and {other.device}")
    if validate_kernels(kernels) == "reference":
        return False
    supported = first.dtype in _SUPPORTED or not (first.is_floating_point() or first.is_complex())
    if kernels == "auto" and not (first.is_cuda and supported and has_triton()):
        return False
    if first.is_cuda and first.device.index != (current := torch.cuda.current_device()):
        problem = f"these tensors are on {first.device}: call torch.cuda.set_device({first.device.index}) first"
        raise ValueError(f"Triton launches kernels on the current GPU, cuda:{current}, but {problem}")
    if kernels == "auto":
        return True
    if not supported:
        raise ValueError(f'kernels="triton" supports bfloat16, float16 and float32: got {first.dtype}')
    from .gpu.launch_args import interpreter_enabled

    if interpreter_enabled() and first.dtype == torch.bfloat16:
        raise ValueError("Triton's interpreter gives wrong results in bfloat16: use float16 or float32")
    if not (first.is_cuda or interpreter_enabled()):
        needs = "tensors on a GPU, or TRITON_INTERPRET=1 set before triton is imported"
        raise ValueError(f'kernels="triton" needs {needs}: got {first.device}; kernels="auto" uses plain torch there')
    return True


def forbid_double_backward(what: str = "the Triton kernels", instead: str = 'use kernels="reference"') -> None:
    """Raise RuntimeError in a backward with create_graph=True. Call it in a backward that records no graph.

    With torch's `once_differentiable`, the second derivative would be silently zero wherever the output gradient is a
    constant, as that of a loss is.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"{what} cannot be differentiated twice (create_graph): {instead}")


def aligned(name: str, x: Tensor) -> Tensor:
    """Return `x`, or a copy if it does not begin at a multiple of 16 bytes. Warns once for each name.

    For another address, Triton would compile a slower variant of the kernel: in the middle of a run, or while a CUDA
    graph is captured, where it fails.
    """
    if is_traced(x) or x.data_ptr() % ALIGNMENT == 0:
        return x
    if name not in _copied:
        _copied.add(name)
        begins = f"{x.data_ptr() % ALIGNMENT} bytes after a multiple of {ALIGNMENT} (offset {x.storage_offset()})"
        warnings.warn(f"{name} is copied for the Triton kernels in each call: it begins {begins}", stacklevel=3)
    return x.clone(memory_format=torch.contiguous_format)


def check_contiguous_rows(name: str, x: Tensor) -> Tensor:
    """Return `x`, or an aligned copy, if it is [rows, columns] with contiguous rows. Raises ValueError otherwise."""
    if x.ndim != 2 or (x.stride(1) != 1 and x.shape[1] > 1 and len(x)):
        got = f"{[*x.shape]} with strides {x.stride()}"
        raise ValueError(f"{name} must be [rows, columns] with contiguous rows: got {got}")
    return aligned(name, x)


def check_contiguous(name: str, x: Tensor) -> Tensor:
    """Return `x` if it is contiguous. Raises ValueError otherwise."""
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous: got {[*x.shape]} with strides {x.stride()}")
    return x
