"""The command, measuring for real with small sizes, and its errors."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import tyro

from moe_dualpipe.commands import plan_calibrate
from moe_dualpipe.commands.plan_calibrate import CalibrateCommand
from moe_dualpipe.tools.planner.calibration import Plan, measure
from moe_dualpipe.tools.planner.calibration.links import rates
from moe_dualpipe.tools.planner.device import KINDS, load_device

SMALL = Plan("cpu", 2, widths=(16, 32), numbers=2**12, seconds=0.001, message=2**12)


def test_two_processes_measure_kernels_and_their_link(tmp_path, monkeypatch, capsys):
    asked = []

    def small(plan):
        asked.append(plan)
        return measure(replace(SMALL, processes=plan.processes))

    monkeypatch.setattr(plan_calibrate, "measure", small)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(5)})
    path = tmp_path / "laptop.json"
    CalibrateCommand(out=path, device="cpu", processes=2, seconds=0.5).run()
    assert asked == [Plan("cpu", 2, seconds=0.5)]
    device = load_device(path)
    assert device.name == "laptop"
    assert device.peak["fp32"] > 1e6
    for kind in KINDS:
        assert len(device.curves[kind]["fp32"]) == 2
    assert max(share for kind in KINDS for _, share in device.curves[kind]["fp32"]) == 1
    assert device.domain.gpus == 2
    assert device.domain.bandwidth > 1e3
    assert "2 processes at the same time" in device.sources["efficiency"]
    printed = capsys.readouterr().out
    assert printed.startswith("2 processes, each: ")
    assert printed.endswith(f"wrote {path}\n")
    assert "latency" in printed


def test_one_process_for_each_core(tmp_path, monkeypatch):
    def stop(plan):
        raise ValueError(f"{plan.processes} on {plan.device}")

    monkeypatch.setattr(plan_calibrate, "measure", stop)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(5)})
    with pytest.raises(ValueError, match="5 on cpu"):
        CalibrateCommand(out=tmp_path / "a.json", device="cpu").run()


def test_the_link_of_a_pair():
    assert rates(1000, 1.0, 2.0, 0.5) == {"bandwidth": 1000.0, "share": 0.25, "latency": 0.5}
    assert rates(1000, 4.0, 1.0, 0.5) == {"bandwidth": 500.0, "share": 1.0, "latency": 0.5}


def test_a_process_that_fails_ends_the_others():
    with pytest.raises(ValueError, match=r"measuring process [01] failed: .*negative"):
        measure(replace(SMALL, widths=(-4,)))


def test_options_of_the_command_line():
    words = ["--out", "a/b.json", "--processes", "3", "--seconds", "1.5", "--device", "cpu"]
    assert tyro.cli(CalibrateCommand, args=words) == CalibrateCommand(Path("a/b.json"), 3, 1.5, device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_process_that_fails_is_one_line():
    with pytest.raises(ValueError, match=r"measuring process 0 failed: .+") as error:
        measure(replace(SMALL, device="cuda", processes=1))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("options,message", [
    ({"out": "machine.txt"}, "cannot write 'machine.txt': use .json"),
    ({"out": "none/machine.json"}, "the folder 'none' does not exist"),
    ({"seconds": 0.0}, "--seconds must be at least 0.001: got 0.0"),
    ({"processes": 0}, "--processes must be at least 1: got 0"),
])  # fmt: skip
def test_invalid_options(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    options["out"] = Path(options.get("out", "machine.json"))
    with pytest.raises(ValueError) as error:
        CalibrateCommand(**options).run()
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu():
    with pytest.raises(ValueError, match="--device cuda: torch finds no GPU"):
        CalibrateCommand(device="cuda").run()
