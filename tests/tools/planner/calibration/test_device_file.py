"""The device file from what was measured."""

import json

import pytest

from moe_dualpipe.tools.planner.calibration.device_file import LINK, Machine, device_value, to_text
from moe_dualpipe.tools.planner.device import FOLDER, KINDS, load_device

CPU = Machine("mine", "fp32", memory_gb=8.0, sms=1, software="torch", devices=4)
CURVE = [[1e6, 1e-3], [1e9, 1e-2]]  # 1 and 100 GFLOP/s


def measured(**others):
    curves = {kind: [[flops, seconds] for flops, seconds in CURVE] for kind in KINDS}
    curves["grouped"] = [[2e6, 4e-3], [2e9, 4e-2]]
    return {"curves": curves, "copy": 8e9, "passes": 2e9, "launch": 2e-6} | others


def loaded(tmp_path, value):
    path = tmp_path / "mine.json"
    path.write_text(to_text(value))
    return load_device(path)


def test_the_fastest_kernel_of_a_cpu_is_its_peak(tmp_path):
    device = loaded(tmp_path, device_value(CPU, measured()))
    assert device.peak == {"fp32": 1e11}
    assert device.wide == "fp32"
    assert [device.efficiency("product", "fp32", flops) for flops in (1e6, 1e9)] == [0.01, 1.0]
    assert [device.efficiency("grouped", "fp32", flops) for flops in (2e6, 2e9)] == [0.005, 0.5]
    assert device.efficiency("attention_forward", "fp8", 1e9) == 1.0
    assert (device.memory_bandwidth, device.memory_share, device.launch) == (8e9, 0.25, 2e-6)
    assert (device.name, device.memory_gb, device.sms) == ("mine", 8.0, 1)
    assert (device.domain.gpus, device.domain.bandwidth, device.domain.latency) == (4, 1e9, 1e-4)
    assert device.network == type(device.network)(**LINK)


def test_passes_in_the_cache_are_not_above_the_bandwidth(tmp_path):
    device = loaded(tmp_path, device_value(CPU, measured(passes=1.6e10)))
    assert (device.memory_bandwidth, device.memory_share) == (1.6e10, 1.0)


def test_the_link_is_a_default_to_edit():
    value = device_value(CPU, measured())
    assert value["domain"] == {"gpus": 4, **LINK} and value["network"] == LINK
    assert "not measured" in value["sources"]["domain"]
    assert "not measured" not in value["sources"]["launch"]


def test_a_known_gpu_keeps_its_data_sheet(tmp_path):
    h100 = json.loads((FOLDER / "h100.json").read_text())
    machine = Machine("mine", "bf16", 85.0, 132, "torch", known=h100)
    device = loaded(tmp_path, device_value(machine, measured()))
    known = load_device("h100")
    assert device.peak == known.peak
    assert device.efficiency("product", "bf16", 1e9) == pytest.approx(1e11 / 989.4e12, rel=1e-3)
    assert device.memory_bandwidth == known.memory_bandwidth
    assert device.memory_share == pytest.approx(2e9 / 3.35e12, rel=1e-3)
    assert device.network == known.network
    assert (device.domain.bandwidth, device.domain.gpus) == (known.domain.bandwidth, 1)
    # fp8 was not measured: the curves of the package
    assert device.efficiency("grouped", "fp8", 1e12) == known.efficiency("grouped", "fp8", 1e12)


def test_each_point_of_a_curve_is_on_one_line():
    value = device_value(CPU, measured())
    text = to_text(value)
    assert json.loads(text) == value
    assert "[1000000.0, 0.01]" in text
