"""Calibration: what is timed, the device file that is written, and the command."""

import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_dualpipe.commands.plan_calibrate import CalibrateCommand
from moe_dualpipe.tools.planner import calibration
from moe_dualpipe.tools.planner.calibration import LINK, device_value, measure, to_text
from moe_dualpipe.tools.planner.device import FOLDER, KINDS, load_device

CPU = torch.device("cpu")
FACTS = {"name": "mine", "aliases": [], "memory_gb": 8.0, "sms": 1, "cpu": ""}
RATES = {kind: [[1e6, 1e-3], [1e9, 1e-2]] for kind in KINDS} | {"grouped": [[2e6, 4e-3], [2e9, 4e-2]]}
MEASURED = {"curves": RATES, "copy": 8e9, "passes": 2e9, "launch": 2e-6}  # products reach 1 and 100 GFLOP/s


def loaded(tmp_path, value):
    path = tmp_path / "mine.json"
    path.write_text(to_text(value))
    return load_device(path)


def test_flops_are_those_that_torch_counts(monkeypatch):
    """With a count of FLOPs for a clock. torch does not count grouped products, so these are counted one by one. Causal
    attention is half, and a fused backward has five products where torch's has four."""

    def counted(run, *_):
        with FlopCounterMode(display=False) as counter:
            run()
        return float(counter.get_total_flops() or 1)

    def parts(offsets):
        return enumerate(zip(offsets.tolist(), offsets.tolist()[1:], strict=False))

    monkeypatch.setattr(calibration, "seconds_of", counted)
    monkeypatch.setattr(calibration, "grouped_mm", lambda x, w, offsets, transposed=False: [
        x[a:b] @ (w[e] if transposed else w[e].mT) for e, (a, b) in parts(offsets)])  # fmt: skip
    monkeypatch.setattr(calibration, "grouped_wgrad", lambda dy, x, offsets: [
        dy[a:b].mT @ x[a:b] for _, (a, b) in parts(offsets)])  # fmt: skip
    with sdpa_kernel(SDPBackend.MATH):
        curves = measure(CPU, 0.0, widths=(8, 16), numbers=8192)["curves"]
    for kind in KINDS:
        for width, (flops, count) in zip((8, 16), curves[kind], strict=True):
            causal = (4 * width + 1) / (8 * width) if kind.startswith("attention") else 1
            assert flops == pytest.approx(count * causal * (5 / 4 if kind == "attention_backward" else 1)), kind
    monkeypatch.setattr(calibration, "seconds_of", lambda *_: 2.0)
    rates = measure(CPU, 0.0, widths=(8,), numbers=8192)
    assert (rates["copy"], rates["passes"]) == (8192 * 4 * 2 / 2, 2 * 256 * 4 * 16 / 2)
    assert rates["launch"] == 2.0 / (2 * calibration.CHAIN)


def test_a_time_is_the_lower_quartile_and_on_a_cpu_that_of_the_thread(monkeypatch):
    asked = {}
    timed = SimpleNamespace(blocked_autorange=lambda **_: SimpleNamespace(times=[9.0, 2.0, 8.0, 3.0, 7.0]))
    monkeypatch.setattr(calibration, "Timer", lambda _, **options: asked.update(options) or timed)
    assert calibration.seconds_of(lambda: None, CPU, 0.5) == 3.0 and asked["timer"] is time.thread_time


def test_the_fastest_kernel_of_a_cpu_is_its_peak_and_its_links_are_to_edit(tmp_path):
    value = device_value(FACTS, "fp32", 4, MEASURED, {})
    device = loaded(tmp_path, value)
    assert (device.peak, device.wide) == ({"fp32": 1e11}, "fp32")
    assert [device.share("product", "fp32", flops) for flops in (1e6, 1e9)] == [0.01, 1.0]
    assert [device.share("grouped", "fp32", flops) for flops in (2e6, 2e9)] == [0.005, 0.5]
    assert device.share("attention_forward", "fp8", 1e9) == 1.0
    assert (device.memory_bandwidth, device.efficiency.memory, device.launch) == (8e9, 0.25, 2e-6)
    assert value["domain"] == {"gpus": 4, **LINK} and value["network"] == LINK
    assert json.loads(to_text(value)) == value and "[1000000.0, 0.01]" in to_text(value)
    cached = loaded(tmp_path, device_value(FACTS, "fp32", 4, MEASURED | {"passes": 1.6e10}, {}))
    assert (cached.memory_bandwidth, cached.efficiency.memory) == (1.6e10, 1.0)


def test_a_known_gpu_keeps_its_data_sheet(tmp_path):
    h100, known = json.loads((FOLDER / "h100.json").read_text()), load_device("h100")
    device = loaded(tmp_path, device_value(FACTS | {"cpu": "x86"}, "bf16", 1, MEASURED, h100))
    assert (device.peak, device.memory_bandwidth, device.network) == (known.peak, known.memory_bandwidth, known.network)
    assert device.share("product", "bf16", 1e9) == pytest.approx(1e11 / 989.4e12, rel=1e-3)
    assert device.efficiency.memory == pytest.approx(2e9 / 3.35e12, rel=1e-3)
    assert (device.domain.bandwidth, device.domain.gpus) == (known.domain.bandwidth, 1)
    assert device.share("grouped", "fp8", 1e12) == known.share("grouped", "fp8", 1e12)  # not measured


def test_the_command_measures_one_core(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(calibration, "measure", lambda device, least: measure(device, least / 500, (16, 32), 2**13))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(5)})
    path = tmp_path / "laptop.json"
    CalibrateCommand(out=path, device="cpu", seconds=0.5).run()
    device = load_device(path)
    assert (device.name, device.domain.gpus, device.cpu) == ("laptop", 5, "")
    curves = [getattr(device.efficiency, kind)["fp32"] for kind in KINDS]
    assert max(share for curve in curves for _, share in curve) == 1 and {*map(len, curves)} == {2}
    assert capsys.readouterr().out == f"wrote {path}\n"
