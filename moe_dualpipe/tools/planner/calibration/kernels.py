"""Time the kernels of a layer at several sizes, on one device.

A size is a width D: the products of a linear layer on 4 D rows, forward and for both gradients; those of 8 experts with
D rows each; and causal attention over 4 D positions. A measurement is the lower quartile of groups of launches, because
other programs only make it slower. A group is long enough for the clock. On a CPU, the seconds of this thread count:
not those in which another program had the core.

D width, T rows, E experts, M rows of all experts, S positions, H heads, C width of a head.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from ....kernels.grouped_gemm import grouped_mm, grouped_wgrad

EXPERTS, HEADS, HEAD_WIDTH = 8, 4, 64
GROUP = 1e-3
"""Seconds of a group of launches, at least."""
CHAIN = 64
"""Short kernels in a row."""
BACKWARD_FLOPS = 2.5
"""FLOPs of attention's backward relative to its forward, as the planner counts them."""


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times on one device. seconds: spent on each measurement, at least."""

    device: torch.device
    seconds: float

    def time(self, run: Callable[[], Any]) -> float:
        """Seconds of one `run`."""
        self._group(run, 1)  # compiles, allocates
        launches = max(1, round(GROUP / self._group(run, 1)))
        times = []
        end = time.perf_counter() + self.seconds
        while len(times) < 3 or time.perf_counter() < end:
            times.append(self._group(run, launches))
        return sorted(times)[len(times) // 4]

    def _group(self, run: Callable[[], Any], launches: int) -> float:
        clock = time.perf_counter if self.device.type == "cuda" else time.thread_time
        self._wait()
        start = clock()
        for _ in range(launches):
            run()
        self._wait()
        return (clock() - start) / launches

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    device: torch.device, seconds: float = 0.2, widths: Sequence[int] = (), numbers: int = 0
) -> dict[str, Any]:  # fmt: skip
    """Measure one GPU in bfloat16, or one core of the CPU in float32.

    seconds: spent on each measurement, at least. widths: of layers, increasing. numbers: in each tensor that is copied.
    Without these two, sizes that suit the device.

    "curves": kind of kernel -> (FLOPs of a launch, seconds of a launch) by size. "copy", "passes": bytes per second,
    read and written, of a large copy, and of norms, activations and sums. "launch": seconds from one short kernel to
    the next.
    """
    cuda = device.type == "cuda"
    watch, dtype = Stopwatch(device, seconds), torch.bfloat16 if cuda else torch.float32
    widths = widths or ((256, 512, 1024, 2048, 4096, 8192) if cuda else (32, 64, 128, 256, 512, 1024))
    numbers = numbers or (2**28 if cuda else 2**24)
    torch.set_num_threads(1)
    curves = {
        "product": [products(watch, dtype, D) for D in widths],
        "grouped": [grouped_products(watch, dtype, D) for D in widths],
    }
    both = [attention(watch, dtype, 4 * D) for D in widths]
    curves |= {"attention_forward": [f for f, _ in both], "attention_backward": [b for _, b in both]}
    rates = {"copy": copy(watch, dtype, numbers), "passes": passes(watch, dtype, numbers // 16)}
    return {"curves": curves, **rates, "launch": launch(watch)}


def products(watch: Stopwatch, dtype: torch.dtype, D: int) -> tuple[float, float]:
    """FLOPs and average seconds of the three products of a linear layer from D to D, on 4 D rows."""
    x_TD, dy_TD, w_DD = (torch.randn(rows, D, device=watch.device, dtype=dtype) for rows in (4 * D, 4 * D, D))
    runs = (lambda: x_TD @ w_DD.mT, lambda: dy_TD @ w_DD, lambda: dy_TD.mT @ x_TD)
    return 8.0 * D**3, sum(map(watch.time, runs)) / 3


def grouped_products(watch: Stopwatch, dtype: torch.dtype, D: int) -> tuple[float, float]:
    """FLOPs and average seconds of the three grouped products of experts from D to D / 2, with D rows each."""
    x_MD = torch.randn(EXPERTS * D, D, device=watch.device, dtype=dtype)
    dy_MF = torch.randn(EXPERTS * D, D // 2, device=watch.device, dtype=dtype)
    w_EFD = torch.randn(EXPERTS, D // 2, D, device=watch.device, dtype=dtype)
    offsets = torch.arange(0, EXPERTS * D + 1, D, device=watch.device, dtype=torch.int32)
    runs = (
        lambda: grouped_mm(x_MD, w_EFD, offsets), lambda: grouped_mm(dy_MF, w_EFD, offsets, transposed=True),
        lambda: grouped_wgrad(dy_MF, x_MD, offsets),
    )  # fmt: skip
    return float(EXPERTS * D**3), sum(map(watch.time, runs)) / 3


def attention(watch: Stopwatch, dtype: torch.dtype, S: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """FLOPs and seconds of the forward, and of the backward, of causal attention over S positions."""
    shape = (1, HEADS, S, HEAD_WIDTH)
    q, k, v = (torch.randn(shape, device=watch.device, dtype=dtype, requires_grad=True) for _ in range(3))
    flops = 2.0 * HEADS * HEAD_WIDTH * S * (S + 1)
    forward = watch.time(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    backward = watch.time(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    return (flops, forward), (BACKWARD_FLOPS * flops, backward)


def copy(watch: Stopwatch, dtype: torch.dtype, numbers: int) -> float:
    """Bytes per second, read and written."""
    source = torch.ones(numbers, device=watch.device, dtype=dtype)
    target = torch.empty_like(source)
    return 2 * numbers * source.element_size() / watch.time(lambda: target.copy_(source))


def passes(watch: Stopwatch, dtype: torch.dtype, numbers: int) -> float:
    """Bytes per second of a norm, a gated activation and a residual sum, forward and backward.

    A pass over n numbers counts what a fused kernel must read and write: the norm 2 n and 3 n, the activation 3 n and
    5 n, the sum 3 n.
    """
    width = 256
    shape = (max(1, numbers // width), width)
    x, y = (torch.randn(shape, device=watch.device, dtype=dtype, requires_grad=True) for _ in range(2))
    gradient = torch.randn(shape, device=watch.device, dtype=dtype)

    def run() -> None:
        normed = F.rms_norm(x, (width,))
        out = x + F.silu(normed) * y
        torch.autograd.grad(out, (x, y), gradient)

    return 16 * x.numel() * x.element_size() / watch.time(run)


def launch(watch: Stopwatch) -> float:
    """Seconds of a kernel without work, in a forward and a backward of many."""
    x = torch.ones(1, device=watch.device, requires_grad=True)

    def run() -> None:
        y = x
        for _ in range(CHAIN):
            y = y.neg()
        torch.autograd.grad(y, x)

    return watch.time(run) / (2 * CHAIN)
