"""What is timed, against torch's count of FLOPs, and how."""

import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_dualpipe.tools.planner.calibration import kernels
from moe_dualpipe.tools.planner.calibration.kernels import Stopwatch

CPU = torch.device("cpu")


class Counts:
    """A stopwatch that counts FLOPs instead of seconds."""

    device = CPU

    def time(self, run):
        with FlopCounterMode(display=False) as counter:
            run()
        return float(counter.get_total_flops())


@pytest.mark.parametrize("function", [kernels.products, kernels.grouped_products])
def test_flops_of_products(function, monkeypatch):
    """torch does not count grouped products, so experts are computed one by one."""

    def one_by_one(x, w, offsets, transposed=False):
        slices = zip(offsets.tolist(), offsets.tolist()[1:], strict=False)
        return [x[a:b] @ (w[e] if transposed else w[e].mT) for e, (a, b) in enumerate(slices)]

    def gradients(dy, x, offsets):
        return [dy[a:b].mT @ x[a:b] for a, b in zip(offsets.tolist(), offsets.tolist()[1:], strict=False)]

    monkeypatch.setattr(kernels, "grouped_mm", one_by_one)
    monkeypatch.setattr(kernels, "grouped_wgrad", gradients)
    for width in (8, 16):
        flops, counted = function(Counts(), torch.float32, width)
        assert flops == pytest.approx(counted)
        assert flops > 0


def test_flops_of_attention_count_the_causal_half():
    positions = 12
    with sdpa_kernel(SDPBackend.MATH):
        (forward, all_scores), (backward, all_gradients) = kernels.attention(Counts(), torch.float32, positions)
    half = (positions + 1) / (2 * positions)
    assert forward == pytest.approx(all_scores * half)
    # torch's unfused backward has four products, a fused one computes the scores once more: five for two
    assert backward == pytest.approx(all_gradients * half * 5 / 4)


def test_bytes_and_launches(monkeypatch):
    """With a stopwatch that says 2 s for everything, rates are half of what is moved."""
    watch = SimpleNamespace(device=CPU, time=lambda run: (run(), 2.0)[1])
    assert kernels.copy(watch, torch.float32, 1000) == 1000 * 4 * 2 / 2
    assert kernels.passes(watch, torch.float32, 1024) == 1024 * 4 * 16 / 2
    called = []
    negate = torch.Tensor.neg
    monkeypatch.setattr(torch.Tensor, "neg", lambda x: (called.append(1), negate(x))[1])
    assert kernels.launch(watch) == 2 / (2 * len(called))


def test_the_stopwatch_takes_the_lower_quartile_of_groups(monkeypatch):
    clock = SimpleNamespace(now=0.0, runs=0)
    for name in ("perf_counter", "thread_time"):
        monkeypatch.setattr(time, name, lambda: clock.now)

    def run():
        clock.runs += 1
        group = max(0, clock.runs - 3) // 10
        clock.now += 1e-4 if group % 10 < 3 else 3e-4  # 7 of 10 groups are disturbed

    watch = Stopwatch(CPU, 0.05)
    assert watch.time(run) == pytest.approx(1e-4)
    assert clock.now > 0.05
    # 10 launches make a group of a millisecond
    assert (clock.runs - 2) % 10 == 0


def test_slow_launches_are_timed_three_times(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(time, "thread_time", lambda: clock.now / 4)

    def run():
        clock.now += 2.0

    # The thread had the core for a quarter of the time.
    assert Stopwatch(CPU, 0.05).time(run) == 0.5
    assert clock.now == 2.0 * (2 + 3)


def test_all_kinds_at_all_widths():
    measured = kernels.measure(CPU, 0.001, widths=(16, 32), numbers=4096)
    assert {*measured["curves"]} == {"product", "grouped", "attention_forward", "attention_backward"}
    for curve in measured["curves"].values():
        (small, _), (large, _) = curve
        assert 0 < small < large
