"""What is read from a machine: files like those of Linux, and folders. What does not answer is given up."""

import socket
import time
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.tools.cluster.bounded_calls import Steps, run_watched
from moe_dualpipe.tools.cluster.facts import gather_facts, infiniband_ports, read_versions, remove_mark, try_folder

FIRST = Launch(0, 0, 4, 2)


def test_facts_of_this_machine(tmp_path):
    facts = gather_facts(FIRST, tmp_path / "runs" / "new", Steps(), {"NCCL_IB_TC": "106", "HOME": "/root"})
    assert (facts.host, facts.local_size, facts.num_gpus) == (socket.gethostname(), 2, torch.cuda.device_count())
    assert facts.alike["torch"] == torch.__version__ and facts.alike["NCCL_IB_TC"] == "106"
    assert "HOME" not in facts.alike and facts.open_files > 0 and facts.free
    assert Path(facts.mark).exists()  # torchrun's other machines look for it
    remove_mark(facts)
    assert [*tmp_path.iterdir()] == []
    other = gather_facts(Launch(1, 1, 4, 2), tmp_path, Steps(), {})
    assert other.free is None  # the first rank of a machine speaks for it


def test_versions_of_a_driver(tmp_path):
    lines = {
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Jan 13 10:00:00 UTC 2024": "535.161.08",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build": "570.86.10",
    }
    for line, version in lines.items():
        (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
        assert read_versions(tmp_path / "version")["driver"] == version
    assert "driver" not in read_versions(tmp_path / "absent")


def test_infiniband_ports(tmp_path):
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert infiniband_ports(tmp_path) == "1 x ACTIVE, 400 Gb/sec (4X NDR); 1 x DOWN, 400 Gb/sec (4X NDR)"
    assert infiniband_ports(tmp_path / "absent") == ""


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert try_folder(tmp_path / "file" / "runs", False)["unwritable"]
    assert try_folder(Path("/proc/runs"), True)["unwritable"]
    assert try_folder(tmp_path / "new", False) == {"folder": str(tmp_path), "free": ANY, "mark": ""}
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def wait(steps):
    steps.start("reading a disk")
    time.sleep(1000)


def fail(steps):
    steps.start("reading a disk")
    advice = "This is typically caused by a remote worker crashing."
    raise RuntimeError(f"[/gloo/tcp/pair.cc:553] it is gone. {advice}\nException raised from some C++ file")


@pytest.mark.parametrize("function,ended", [
    (wait, (None, "reading a disk: no answer for 0.05 s")), (fail, (None, "reading a disk: it is gone")),
    (lambda _: 3, (3, "")),
])  # fmt: skip
def test_a_function_that_does_not_return_is_given_up(function, ended):
    assert run_watched(function, 0.05) == ended
