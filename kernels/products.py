"""Products of fp32 matrices on a CPU: in the library that torch calls (MKL on x86), or in oneDNN.

Torch is built with both. MKL chooses code by the vendor of the CPU, and uses AVX-512 on Intel alone. oneDNN goes by the
instructions that the CPU has. Zen 4 multiplies 512 bits in two halves, so there AVX2 (MKL) is as fast as AVX-512.

Torch calls oneDNN for fp32 matrices if `torch.backends.mkldnn.matmul.fp32_precision` permits rounding to bf16. Without
AMX, oneDNN does not round; `choose_products` checks this. The permission is given around our products alone, because
attention is slower in oneDNN. While given, it also holds for other threads.

CPU, dtype, sizes and options decide the library, never a measurement, so runs on one CPU have the same bits. For each
new shape oneDNN generates code, which takes longer than a small product. So each expert's number of rows is rounded
(`rows_step`). In 16 bits torch itself uses oneDNN if the CPU has AVX-512, and in fp64 never; without AVX-512, rounded
rows only cost a little. With AMX, code for a new shape in bf16 took 1.8 ms, and the product of 200 x 256 x 128 itself
0.06 ms.

M rows, I input width, O output width.
"""

import functools
import os
import platform
import re
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
ZEN_5 = 26
"""Family of AMD's CPUs."""

_SETTING: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
_in_use = threading.RLock()  # all threads share the setting
# A process is forked between products: its copy of the lock is free, and the setting is torch's.
os.register_at_fork(before=_in_use.acquire, after_in_parent=_in_use.release, after_in_child=_in_use.release)


def choose_products(products: Products, kind: str) -> Library:
    """The library for `products` on a device of this kind, cpu or cuda.

    Raises ValueError if oneDNN is not there, or would not compute in fp32.
    """
    faster = torch.backends.mkl.is_available() and _is_wide_amd(_cpu())
    if products == "mkl" or (products == "auto" and not faster):
        return "mkl"
    missing = ""
    if kind != "cpu":
        missing = "a CPU, and this run is on a GPU"
    elif not torch.backends.mkldnn.is_available():
        missing = "oneDNN, which this PyTorch lacks"
    elif torch.backends.cpu.get_cpu_capability() != "AVX512" or not _onednn_is_precise():
        missing = "a CPU with AVX-512, without AMX"
    if products == "onednn" and missing:
        raise ValueError(f"compute.products=onednn needs {missing}: use compute.products=auto")
    return "mkl" if missing else "onednn"


@functools.cache
def _cpu() -> str:
    """What the system says of its CPU."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.read_text() if cpuinfo.exists() else platform.processor()


def _is_wide_amd(cpu: str) -> bool:
    """Whether this is a CPU of AMD that multiplies 512 bits at once."""
    family = re.search(r"family\s*:?\s*(\d+)", cpu, re.IGNORECASE)
    return "AuthenticAMD" in cpu and family is not None and int(family[1]) >= ZEN_5


@functools.cache
def _onednn_is_precise() -> bool:
    """Whether oneDNN keeps all 24 bits of fp32 numbers. With AMX, it rounds them to the 8 bits of bf16."""
    x, one = torch.full((64, 64), 1 + 2**-23, dtype=torch.float32, device="cpu"), torch.eye(64, device="cpu")
    with _onednn():
        return torch.equal(x @ one.float(), x)


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
    """Multiply in this library from now on, in this process. What torch.compile has compiled keeps its library."""
    global _library
    _library = library


def in_onednn(x: Tensor) -> bool:
    """Whether oneDNN multiplies rows like `x`, if there are enough."""
    return _library == "onednn" and x.dtype == torch.float32 and x.device.type == "cpu"


def generates_code(x: Tensor) -> bool:
    """Whether oneDNN, which generates code for each number of rows, may multiply rows like `x`: fp32 or 16 bits."""
    return in_onednn(x) or (x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16))


def is_onednn_product(x: Tensor, outputs: int) -> bool:
    """Whether oneDNN multiplies x [..., I] by weights of `outputs` rows."""
    return in_onednn(x) and x.numel() * outputs >= SMALLEST


def rows_step(rows: int) -> int:
    """Multiples of this number are at most an eighth of `rows`, or 7, below or above it.

    There are at most 8 of them between a power of two and the next.
    """
    return max(8, 1 << max(rows.bit_length() - 4, 0))


def chosen_library(x: Tensor, outputs: int) -> AbstractContextManager[None]:
    """The context in which to multiply x [..., I] by weights with `outputs` outputs."""
    return _onednn() if is_onednn_product(x, outputs) else nullcontext()


def product(a_MI: Tensor, b_IO: Tensor) -> Tensor:
    """Return a b, [M, O]."""
    return _product_in_onednn(a_MI, b_IO) if is_onednn_product(a_MI, b_IO.shape[1]) else a_MI @ b_IO


@opaque(lambda a_MI, b_IO: a_MI.new_empty(len(a_MI), b_IO.shape[1]))
def _product_in_onednn(a_MI: Tensor, b_IO: Tensor) -> Tensor:
    with _onednn():
        return a_MI @ b_IO
