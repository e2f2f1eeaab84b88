"""What is read from a machine: files like those of Linux, ports, folders, and NCCL's log."""

import socket
from contextlib import closing
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.tools.cluster.bounded_calls import Steps, run_watched
from moe_dualpipe.tools.cluster.links import start_nccl_log, uses_sockets
from moe_dualpipe.tools.cluster.probes import (
    AGENT_STORE,
    gather_facts,
    infiniband_ports,
    is_free,
    read_versions,
    remove_mark,
    rendezvous_port,
    try_folder,
)

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
    assert other.free is None and other.port is None  # the first rank of a machine speaks for it


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


def test_a_port_that_another_program_uses():
    with closing(socket.socket()) as server:
        server.bind(("", 0))
        port = server.getsockname()[1]
        server.listen()
        assert not is_free(port)
    assert is_free(port)


def test_who_opens_the_rendezvous_port():
    assert rendezvous_port(FIRST, {"MASTER_PORT": "1234"}) == 1234
    assert rendezvous_port(FIRST, {}) == 29500
    assert rendezvous_port(FIRST, {"MASTER_PORT": "1234", AGENT_STORE: "True"}) is None  # torchrun has opened it
    assert rendezvous_port(Launch(1, 1, 4, 2), {"MASTER_PORT": "1234"}) is None
    assert rendezvous_port(Launch(2, 0, 4, 2), {"MASTER_PORT": "1234"}) is None  # on another machine


def test_folders_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    assert try_folder(tmp_path / "file" / "runs", False)["unwritable"] == f"{tmp_path / 'file'}: not a folder"
    assert try_folder(Path("/proc/runs"), True)["unwritable"]
    assert try_folder(tmp_path / "new", False) == {"folder": str(tmp_path), "free": ANY, "mark": ""}
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


LOG = """
gpu-6:4015:4052 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.6<0>
gpu-6:4015:4052 [0] NCCL INFO Channel 07/0 : 0[0] -> 2[0] [receive] via NET/IB/3/GDRDMA
gpu-6:4015:4052 [0] NCCL INFO Channel 00/0 : 3[1] -> 2[0] via P2P/CUMEM
gpu-6:4015:4052 [0] NCCL INFO Channel 00 : 4[a1000] -> 5[c1000] via SHM/direct/direct
gpu-6:4015:4052 [3] NCCL INFO Channel 02/0 : 35[3] -> 42[2] [send] via NET/Socket/0
"""


def test_sockets_in_a_log_of_nccl(monkeypatch):
    for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"):
        monkeypatch.setenv(name, "")  # restores them
        monkeypatch.delenv(name)
    for text, expected in ((LOG, True), (LOG.replace("NET/Socket", "NET/IB"), False)):
        log = start_nccl_log()
        assert log is not None and start_nccl_log() is None
        log.write_text(text)
        assert uses_sockets(log) is expected and not log.exists()
        monkeypatch.delenv("NCCL_DEBUG")
        monkeypatch.delenv("NCCL_DEBUG_FILE")
    assert not uses_sockets(None)


def wait(steps):
    steps.start("reading a disk")
    import time

    time.sleep(1000)


def fail(steps):
    steps.start("reading a disk")
    advice = "This is typically caused by a remote worker crashing."
    raise RuntimeError(f"[/gloo/tcp/pair.cc:553] it is gone. {advice}\nException raised from some C++ file")


@pytest.mark.parametrize(
    "function,failure",
    [(wait, "reading a disk: no answer for 0.05 s"), (fail, "reading a disk: it is gone"), (lambda _: 3, "")],
)
def test_a_function_that_does_not_return_is_given_up(function, failure):
    ended = run_watched(function, 0.05)
    assert (ended.failure, ended.value) == (failure, None if failure else 3)


def test_a_function_is_given_up_when_another_rank_fails():
    ended = run_watched(wait, 60, stop=lambda: True, every=0.01)
    assert ended.waited and ended.failure == "reading a disk: given up, as another rank failed"
