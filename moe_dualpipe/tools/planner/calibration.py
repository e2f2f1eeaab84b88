"""Measure one device of this machine for the planner, and write it as a device file. Links are not measured.

A size is a width D: the products of a linear layer on 4 D rows, forward and for both gradients; those of 8 experts with
D rows each; and causal attention over 4 D positions. A measurement is the lower quartile of groups of launches, because
other programs only make it slower. On a CPU, the seconds of this thread count: not those in which another program had
the core.

A data sheet states a peak. A CPU has none here, so its peak is the fastest kernel that was measured, and other kernels
have a share of it. A GPU that the package knows keeps the peak of its data sheet, and what was not measured: other
precisions, and the network.

D width, E experts, M rows of all experts, F half of D, S positions.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as synchronized

from ...data import strict_json
from ...kernels.grouped_gemm import grouped_mm, grouped_wgrad
from .device import FOLDER, KINDS, known_device, parse_device
from .segment_times import ATTENTION_BACKWARD

EXPERTS, HEADS, HEAD_WIDTH = 8, 4, 64
CHAIN = 64
"""Short kernels in a row."""
LINK = {"bandwidth": 1e9, "share": 0.8, "latency": 1e-4}
"""The link of a machine that the package does not know: a guess."""


def calibrate(name: str, device: torch.device, devices: int, seconds: float = 0.2) -> dict[str, Any]:
    """Measure a GPU or a core, one of `devices` in this machine, and return the value of its device file.

    seconds: spent on each of about 50 measurements, at least.
    """
    facts: dict[str, Any] = {"name": name, "aliases": [], "sms": 1, "cpu": ""}
    facts["memory_gb"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / devices / 1e9
    known: dict[str, Any] = {}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found = known_device(properties.name)
        known = strict_json.read_named(FOLDER / f"{found}.json") if found else {}
        facts |= {"memory_gb": properties.total_memory / 1e9, "sms": properties.multi_processor_count}
        facts["cpu"] = known.get("cpu", "x86")
    return device_value(facts, "fp32" if device.type == "cpu" else "bf16", devices, measure(device, seconds), known)


def device_value(
    facts: Mapping[str, Any], precision: str, devices: int, measured: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    """The value of a device file. facts: what is known without measuring. measured: see `measure`. known: the value of
    the file of this GPU in the package, if any."""
    rates = {kind: [(flops, flops / seconds) for flops, seconds in measured["curves"][kind]] for kind in KINDS}
    fastest = max(rate for curve in rates.values() for _, rate in curve)
    peak = known.get("peak", {}).get(precision) or fastest
    bandwidth = known.get("memory_bandwidth") or max(measured["copy"], measured["passes"])
    curves: dict[str, dict[str, Any]] = {
        kind: dict(getattr(parse_device(known).efficiency, kind)) if known else {} for kind in KINDS
    }
    for kind in KINDS:
        curves[kind][precision] = [[flops, min(1.0, rate / peak)] for flops, rate in rates[kind]]
    link = {key: known["domain"][key] for key in LINK} if known else LINK
    how, sheet = f"measured with torch {torch.__version__}", "data sheet"
    guess = "not measured: a guess; replace it by what your link reaches"
    value = {
        **facts, "memory_bandwidth": bandwidth, "peak": {**known.get("peak", {}), precision: peak},
        "domain": {"gpus": devices, **link}, "network": known.get("network") or link,
        "efficiency": {**curves, "memory": min(1.0, measured["passes"] / bandwidth)}, "launch": measured["launch"],
        "sources": {
            "peak": sheet if known else f"the fastest kernel {how}", "memory": how, "domain": sheet if known else guess,
            "network": sheet if known else "the domain: one machine", "efficiency": how, "launch": how,
        },
    }  # fmt: skip
    # With six significant digits: measurements have no more.
    value = json.loads(json.dumps(value), parse_float=lambda number: float(f"{float(number):.6g}"))
    parse_device(value)
    return value


def to_text(value: Any) -> str:
    """JSON with each point of a curve on one line."""
    text = json.dumps(value, indent=1)
    return re.sub(r"\[\s+([^\[\],{}]+),\s+([^\[\],{}]+?)\s+\]", r"[\1, \2]", text) + "\n"


# ---- Kernels ----


def seconds_of(run: Callable[[], Any], device: torch.device, least: float) -> float:
    """Seconds of one `run`, which is repeated for `least` seconds or longer."""
    clock = time.thread_time if device.type == "cpu" else synchronized
    times = Timer("run()", globals={"run": run}, timer=clock).blocked_autorange(min_run_time=least).times
    return sorted(times)[len(times) // 4]


def measure(device: torch.device, least: float = 0.2, widths: Sequence[int] = (), numbers: int = 0) -> dict[str, Any]:
    """Measure one GPU in bfloat16, or one core of the CPU in float32.

    least: seconds spent on each measurement, at least. widths: of layers, increasing. numbers: in each tensor that is
    copied. Without these two, sizes that suit the device.

    "curves": kind of kernel -> (FLOPs of a launch, seconds of a launch) by size. "copy", "passes": bytes per second,
    read and written, of a large copy, and of norms, activations and sums. "launch": seconds from one short kernel to
    the next.
    """
    cuda = device.type == "cuda"
    widths = widths or ((256, 512, 1024, 2048, 4096, 8192) if cuda else (32, 64, 128, 256, 512, 1024))
    numbers = numbers or (2**28 if cuda else 2**24)
    torch.set_num_threads(1)

    def rand(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16 if cuda else torch.float32, requires_grad=grad)

    def mean(*runs: Callable[[], Any]) -> float:
        return sum(seconds_of(run, device, least) for run in runs) / len(runs)

    def products(D: int) -> tuple[float, float]:
        x_TD, dy_TD, w_DD = rand(4 * D, D), rand(4 * D, D), rand(D, D)
        return 8.0 * D**3, mean(lambda: x_TD @ w_DD.mT, lambda: dy_TD @ w_DD, lambda: dy_TD.mT @ x_TD)

    def grouped(D: int) -> tuple[float, float]:
        x_MD, dy_MF, w_EFD = rand(EXPERTS * D, D), rand(EXPERTS * D, D // 2), rand(EXPERTS, D // 2, D)
        offsets = torch.arange(0, EXPERTS * D + 1, D, device=device, dtype=torch.int32)
        return float(EXPERTS * D**3), mean(
            lambda: grouped_mm(x_MD, w_EFD, offsets), lambda: grouped_mm(dy_MF, w_EFD, offsets, transposed=True),
            lambda: grouped_wgrad(dy_MF, x_MD, offsets),
        )  # fmt: skip

    def attention(S: int) -> tuple[tuple[float, float], tuple[float, float]]:
        q, k, v = (rand(1, HEADS, S, HEAD_WIDTH, grad=True) for _ in range(3))
        flops = 2.0 * HEADS * HEAD_WIDTH * S * (S + 1)
        forward = mean(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        gradient = torch.randn_like(out)
        backward = mean(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
        return (flops, forward), (ATTENTION_BACKWARD * flops, backward)

    curves = {"product": [products(D) for D in widths], "grouped": [grouped(D) for D in widths]}
    both = [attention(4 * D) for D in widths]
    curves |= {"attention_forward": [f for f, _ in both], "attention_backward": [b for _, b in both]}
    source = rand(numbers)
    target, x, y = torch.empty_like(source), *(rand(max(1, numbers // 4096), 256, grad=True) for _ in range(2))
    size = source.element_size()

    def passes() -> None:
        """A norm, a gated activation and a sum. A fused pass over n numbers must read and write 2 n and 3 n for the
        norm, forward and backward, 3 n and 5 n for the activation, and 3 n for the sum."""
        out = x + F.silu(F.rms_norm(x, (256,))) * y
        torch.autograd.grad(out, (x, y), torch.ones_like(out))

    one = rand(1, grad=True)

    def chain() -> None:
        end = one
        for _ in range(CHAIN):
            end = end.neg()
        torch.autograd.grad(end, one)

    return {
        "curves": curves, "copy": 2 * numbers * size / mean(lambda: target.copy_(source)),
        "passes": 16 * x.numel() * size / mean(passes), "launch": mean(chain) / (2 * CHAIN),
    }  # fmt: skip
