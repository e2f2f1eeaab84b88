"""The command, measuring for real with small sizes, and its errors."""

import os
from pathlib import Path

import pytest
import torch
import tyro

from moe_dualpipe.commands import plan_calibrate
from moe_dualpipe.commands.plan_calibrate import CalibrateCommand
from moe_dualpipe.tools.planner.calibration import measure
from moe_dualpipe.tools.planner.device import KINDS, load_device


def test_one_core_is_measured(tmp_path, monkeypatch, capsys):
    asked = []

    def small(device, seconds):
        asked.append((device, seconds))
        return measure(device, 0.001, widths=(16, 32), numbers=2**12)

    monkeypatch.setattr(plan_calibrate, "measure", small)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(5)})
    path = tmp_path / "laptop.json"
    CalibrateCommand(out=path, device="cpu", seconds=0.5).run()
    assert asked == [(torch.device("cpu"), 0.5)]
    device = load_device(path)
    assert device.name == "laptop"
    assert device.peak["fp32"] > 1e6
    for kind in KINDS:
        assert len(device.curves[kind]["fp32"]) == 2
    assert max(share for kind in KINDS for _, share in device.curves[kind]["fp32"]) == 1
    assert device.domain.gpus == 5
    assert "not measured" in device.sources["domain"]
    printed = capsys.readouterr().out
    assert printed.startswith("peak ")
    assert printed.endswith(f"wrote {path}\n")


def test_options_of_the_command_line():
    parsed = tyro.extras.subcommand_cli_from_dict(
        {"calibrate": CalibrateCommand, "other": CalibrateCommand},
        args=["calibrate", "--out", "a/b.json", "--seconds", "1.5", "--device", "cpu"],
    )
    assert parsed == CalibrateCommand(out=Path("a/b.json"), device="cpu", seconds=1.5)


@pytest.mark.parametrize("options,message", [
    ({"out": "machine.txt"}, "cannot write 'machine.txt': use .json"),
    ({"out": "none/machine.json"}, "the folder 'none' does not exist"),
    ({"seconds": 0.0}, "--seconds must be at least 0.001: got 0.0"),
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
