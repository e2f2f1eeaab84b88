"""Products of fp32 matrices on a CPU: in the library that torch calls (MKL on x86), or in oneDNN.

Torch is built with both. MKL chooses code by the vendor of the CPU, and uses AVX-512 on Intel alone. oneDNN goes by the
instructions that the CPU has. Torch calls it for fp32 matrices if `torch.backends.mkldnn.matmul.fp32_precision` permits
it to round them to bf16. Without AMX it does not round, which `choose_products` checks. The permission is given for one
product at a time, because attention is slower in oneDNN.

The library follows from CPU, dtype, sizes and options, never from a measurement, so every run has the same bits. For
each new shape oneDNN generates code, which takes longer than a small product. So the numbers of rows of experts are
rounded (`rows_step`). In 16 bits torch always uses oneDNN, and in fp64 never.

M rows, I input width, O output width.
"""

import functools
import platform
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .fuse import opaque
from .options import Products

Library = Literal["mkl", "onednn"]

SMALLEST = 2**20
"""Multiply-adds of the smallest product in oneDNN. A call takes about 12 us longer than MKL's."""

_SETTING: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
_in_use = threading.RLock()  # the setting is that of all threads


def choose_products(products: Products, kind: str) -> Library:
    """The library for `products` on a device of this kind, cpu or cuda.

    Raises ValueError if oneDNN is not there, or would not compute in fp32.
    """
    built, precise = torch.backends.mkldnn.is_available(), torch.backends.cpu.get_cpu_capability() == "AVX512"
    precise = built and precise and _onednn_is_precise()
    if products == "onednn":
        instead = "use compute.products=auto"
        if kind != "cpu":
            raise ValueError(f"compute.products=onednn needs a CPU, and this run is on a GPU: {instead}")
        if not built:
            raise ValueError(f"compute.products=onednn needs oneDNN, which this PyTorch lacks: {instead}")
        if not precise:
            raise ValueError(f"compute.products=onednn needs a CPU with AVX-512 and without AMX: {instead}")
    if products != "auto":
        return products
    return "onednn" if kind == "cpu" and precise and torch.backends.mkl.is_available() and _is_amd() else "mkl"


@functools.cache
def _is_amd() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return "AuthenticAMD" in (cpuinfo.read_text() if cpuinfo.exists() else platform.processor())


@functools.cache
def _onednn_is_precise() -> bool:
    """Whether oneDNN keeps all 24 bits of fp32 numbers. With AMX, it rounds them to the 8 bits of bf16."""
    x = torch.full((64, 64), 1 + 2**-23)
    with _onednn():
        return torch.equal(x @ torch.eye(64), x)


@contextmanager
def _onednn() -> Iterator[None]:
    with _in_use:
        before, _SETTING.fp32_precision = _SETTING.fp32_precision, "bf16"
        try:
            yield
        finally:
            _SETTING.fp32_precision = before


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


def rows_step(rows: int) -> int:
    """A multiple of this number of rows is close to `rows`: at most an eighth, or 7 rows, away.

    There are at most 8 such multiples between a power of two and the next.
    """
    return max(8, 1 << max(rows.bit_length() - 4, 0))


def chosen_library(x: Tensor, outputs: int) -> AbstractContextManager[None]:
    """In this context, the chosen library multiplies x [..., I] by weights of `outputs` rows."""
    return _onednn() if is_onednn_product(x, outputs) else nullcontext()


@opaque(lambda a_MI, b_IO: a_MI.new_empty(len(a_MI), b_IO.shape[1]))
def product(a_MI: Tensor, b_IO: Tensor) -> Tensor:
    """Return a b, [M, O]."""
    with chosen_library(a_MI, b_IO.shape[1]):
        return a_MI @ b_IO
