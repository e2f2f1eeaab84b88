"""Products of fp32 matrices on a CPU: in the library that torch calls (MKL on x86), or in oneDNN.

Torch is built with both. MKL chooses code by the vendor of the CPU, and uses AVX-512 on Intel alone. oneDNN goes by the
instructions that the CPU has. No public function of torch multiplies dense fp32 matrices in oneDNN, so this calls the
operator that torch.compile puts into frozen models.

The library follows from CPU, dtype, sizes and options, never from a measurement, so every run has the same bits. For
each new shape oneDNN generates code, which takes longer than a small product. So experts get multiples of 32 rows,
which few shapes cover. In 16 bits torch always uses oneDNN, and in fp64 never.

M rows, I input width, O output width.
"""

import functools
import platform
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .options import Products

Library = Literal["mkl", "onednn"]

ROWS = 32
SMALLEST = 2**21
"""Multiply-adds of the smallest product in oneDNN. A call takes about 20 us longer than MKL's."""


def choose_products(products: Products, kind: str) -> Library:
    """The library for `products` on a device of this kind, cpu or cuda. Raises ValueError if oneDNN is not there."""
    built = torch.backends.mkldnn.is_available()
    if products == "onednn" and kind != "cpu":
        raise ValueError("compute.products=onednn needs a CPU, and this run is on a GPU: use compute.products=auto")
    if products == "onednn" and not built:
        raise ValueError("compute.products=onednn needs oneDNN, which this PyTorch lacks: use compute.products=auto")
    if products != "auto":
        return products
    slow = torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512" and _is_amd()
    return "onednn" if kind == "cpu" and built and slow else "mkl"


@functools.cache
def _is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (cpuinfo.read_text() if cpuinfo.exists() else platform.processor())


_library: Library = choose_products("auto", "cpu")


def use_products(library: Library) -> None:
    """Multiply in this library from now on, in this process."""
    global _library
    _library = library


def in_onednn(x: Tensor) -> bool:
    """Whether oneDNN multiplies rows like `x`."""
    return _library == "onednn" and x.dtype == torch.float32 and x.device.type == "cpu"


def is_onednn_product(x: Tensor, outputs: int) -> bool:
    """Whether oneDNN multiplies x [..., I] by weights of `outputs` rows."""
    return in_onednn(x) and x.numel() * outputs >= SMALLEST


def times_transposed(x: Tensor, w_OI: Tensor) -> Tensor:
    """Return x W^T, [..., O] from [..., I]. While autograd records, never in oneDNN, which it cannot differentiate."""
    if torch.is_grad_enabled() or not is_onednn_product(x, len(w_OI)):
        return F.linear(x, w_OI)
    return _onednn(x.reshape(-1, x.shape[-1]), w_OI).view(*x.shape[:-1], len(w_OI))


def transposed_times(dy_MO: Tensor, x_MI: Tensor) -> Tensor:
    """Return dy^T x, [O, I], a sum over the rows. While autograd records, never in oneDNN."""
    whole = len(x_MI) // ROWS * ROWS
    if torch.is_grad_enabled() or not is_onednn_product(x_MI[:whole], dy_MO.shape[1]):
        return dy_MO.T @ x_MI
    y_OI = _onednn(dy_MO[:whole].T, x_MI[:whole].T)
    return y_OI if whole == len(x_MI) else y_OI.addmm_(dy_MO[whole:].T, x_MI[whole:])


def _onednn(x_MI: Tensor, w_OI: Tensor) -> Tensor:
    if not (w_OI.is_contiguous() or w_OI.T.is_contiguous()):
        w_OI = w_OI.contiguous()  # for rows with gaps, oneDNN has only a loop that is 100 times as slow
    return torch.ops.mkldnn._linear_pointwise(x_MI, w_OI, None, "none", [], "")
