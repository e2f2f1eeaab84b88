"""`check cluster` names problems of machines and slow links, in made-up clusters and in real processes with gloo."""

import json
import os
import resource
import socket
import sys
import time
from contextlib import closing
from itertools import combinations

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe import cli
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.tools.cluster import Problem, RankFacts, Report, check
from moe_dualpipe.tools.cluster.check import find_differences, find_slow_links, kinds_of, rounds_of
from tests.support.ranks import exits_and_logs
from tests.support.runs import ROOT

GB = 10**9

# ---- machines ----

ALIKE = {
    "Python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "CUDA": "12.8", "NCCL": "2.28.9", "driver": "570.86.10",
    "GPUs": "2 x NVIDIA H200, 141 GiB", "InfiniBand ports": "1 x ACTIVE, 400 Gb/sec", "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_IB_TC": "106",
}  # fmt: skip


def cluster(*changes):
    """Facts of machines a, b, c ... with two ranks each. changes: what differs on each machine."""
    facts = []
    for i, change in enumerate(changes):
        for j in range(2):
            facts.append(RankFacts(2 * i + j, "abcd"[i], j, True, ALIKE | change, None if j else 9 * 10**12))
    return facts


@pytest.mark.parametrize("change,what,stops", [
    ({"torch": "2.13.0"}, "torch 2.13.0, but 2.11.0 on 4 other ranks: install the same version", True),
    ({"driver": ""}, "driver none, but 570.86.10 on 4 other ranks", False),
    ({"GPUs": "2 x A100"}, "GPUs 2 x A100, but 2 x NVIDIA H200, 141 GiB on 4 other ranks: use equal machines", False),
    ({"NCCL_IB_TC": "0"}, "NCCL_IB_TC 0, but 106 on 4 other ranks: set it to the same value", False),
    ({"InfiniBand ports": "1 x DOWN"}, "InfiniBand ports 1 x DOWN, but 1 x ACTIVE, 400 Gb/sec on 4", False),
])  # fmt: skip
def test_a_machine_that_differs_is_named(change, what, stops):
    (problem,) = find_differences(cluster({}, change, {}))
    assert str(problem).startswith(f"b (ranks 2, 3): {what}") and (problem.stops, problem.machines) == (stops, ["b"])


def test_equal_machines_have_no_problem_and_names_of_interfaces_may_differ():
    assert [*find_differences(cluster({}, {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}, {}))] == []
    assert check.device_of(cluster({}, {}), "auto") == "cuda"


H200 = type("Properties", (), {"name": "NVIDIA H200", "total_memory": 141 << 30})
LIMITS = {
    "hidden GPUs": ({"hidden": 2}, "2 GPUs, but torch finds none: it is built without CUDA", True),
    "no GPU": ({"device": "cuda"}, "torch finds no GPU: use --device cpu", True),
    "fewer GPUs": ({"gpus": 1}, "2 processes, but 1 GPU: start at most 1 with --nproc-per-node", True),
    "used GPU": ({"gpus": 2, "memory": (50, 70)}, "29% of the memory of GPU 0, 1 is in use: end the other", False),
    "locked memory": ({"ports": "1 x ACTIVE", "MEMLOCK": 8 << 20}, "it may lock 8 MiB of memory, and Infini", False),
    "loopback": ({"address": "127.0.1.1"}, "its name resolves to 127.0.1.1, so gloo would listen where other", True),
    "open files": ({"NOFILE": 512}, "a process may open 512 files, and 4 ranks need 544: ulimit -n 65536", False),
    "full disk": ({"min_free": 2**60}, "the run needs 1.15292e+09 GB: delete old runs", False),
    "small shm": ({"free": 64 << 20}, "/dev/shm has 64 MiB free, and NCCL and CPU ranks need 1 GiB", False),
}


@pytest.mark.parametrize("machine,what,stops", LIMITS.values(), ids=LIMITS)
def test_a_machine_below_a_limit_has_a_problem(monkeypatch, tmp_path, machine, what, stops):
    monkeypatch.setattr(check, "count_gpus", lambda: machine.get("gpus", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: H200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: machine.get("memory", (70, 70)))
    monkeypatch.setattr(check.Path, "glob", lambda *_: range(machine.get("hidden", 0)))
    monkeypatch.setattr(check, "infiniband_ports", lambda: machine.get("ports", ""))
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (machine.get(
        "MEMLOCK" if kind == resource.RLIMIT_MEMLOCK else "NOFILE", -1), -1))  # fmt: skip
    address = machine.get("address", "10.0.0.1")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, 0, (address, 0))])
    free = type("Usage", (), {"free": machine.get("free", 64 << 30)})
    monkeypatch.setattr(check.shutil, "disk_usage", lambda _: free)
    arguments = tmp_path / "new", machine.get("min_free", 0), machine.get("device", "auto")
    facts = check.gather_facts(Launch(2, 0, 4, 2), *arguments, lambda _: None)
    (problem,) = facts.problems
    assert what in str(problem) and problem.stops == stops
    assert problem.where == f"{socket.gethostname()} (ranks 2, 3)" and [*tmp_path.iterdir()] == []


def test_versions_and_ports_are_read_from_files_of_the_system(tmp_path):
    lines = {
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.161.08  Sat Jan 13 10:00:00 UTC 2024": "535.161.08",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build": "570.86.10",
    }
    for line, version in lines.items():
        (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.3.0\n")
        assert check.read_versions(tmp_path / "version")["driver"] == version
    assert "driver" not in check.read_versions(tmp_path / "absent")
    for card, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "1: DOWN")):
        port = tmp_path / card / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    found = "1 x ACTIVE, 400 Gb/sec (4X NDR) and 1 x DOWN, 400 Gb/sec (4X NDR)"
    assert check.infiniband_ports(tmp_path) == found and check.infiniband_ports(tmp_path / "absent") == ""


# ---- links ----


def speeds_of(number, ranks=1, slow=lambda _a, _b: 1.0):
    """All links of `number` machines: 340 GB/s within a machine, 46 between machines, times `slow` of the ranks."""
    size = number * ranks
    usual = {True: 340 * GB, False: 46 * GB}
    return {
        (a, b): slow(a, b) * usual[a // ranks == b // ranks] * (1 + 0.01 * (a * size + b) / size**2)
        for a in range(size)
        for b in range(size)
        if a != b
    }


SLOW = {
    "none": (4, 2, lambda *_: 1, []),
    "one link": (4, 1, lambda a, b: 0.1 if (a, b) == (1, 2) else 1, ["rank 1 on b -> rank 2 on c"]),
    "both directions": (4, 1, lambda a, b: 0.1 if {a, b} == {1, 2} else 1,
                        ["rank 1 on b -> rank 2 on c", "rank 2 on c -> rank 1 on b"]),
    "one of two machines": (2, 1, lambda a, _: 0.1 if a else 1, ["rank 1 on b -> rank 0 on a"]),
    "a machine that sends slowly": (4, 2, lambda a, b: 0.1 if a // 2 == 1 != b // 2 else 1,
                                    ["b -> all other machines"]),
    "a slow machine of three": (3, 2, lambda a, b: 0.1 if 1 in (a // 2, b // 2) and a // 2 != b // 2 else 1,
                                ["b -> all other machines", "all other machines -> b"]),
    "a cable between machines": (4, 2, lambda a, b: 0.1 if (a // 2, b // 2) == (1, 2) else 1, ["b -> c"]),
    "a card of one rank": (4, 2, lambda a, b: 0.1 if a == 3 and b // 2 != 1 else 1,
                           ["rank 3 of b -> all ranks"]),
    "a receiving card": (4, 2, lambda a, b: 0.1 if b == 3 and a // 2 != 1 else 1,
                         ["all ranks -> rank 3 of b"]),
    "a GPU within a machine": (2, 4, lambda a, b: 0.1 if a == 5 and b > 3 else 1, ["rank 5 of b -> all ranks"]),
    "all GPUs of a machine": (4, 4, lambda a, b: 0.1 if a // 4 == b // 4 == 2 else 1, ["within c"]),
}  # fmt: skip


@pytest.mark.parametrize("number,ranks,slow,expected", SLOW.values(), ids=SLOW)
def test_the_cause_of_slow_links_is_named_once(number, ranks, slow, expected):
    speeds, host = speeds_of(number, ranks, slow), {rank: "abcd"[rank // ranks] for rank in range(number * ranks)}
    assert [problem.where for problem in find_slow_links(speeds, host)] == expected
    within, between = number * ranks * (ranks - 1), number * (number - 1) * ranks**2
    assert [len(links) for _, links, _ in kinds_of(speeds, host)] == [count for count in (within, between) if count]


@pytest.mark.parametrize("sizes", [[1], [4], [1, 1, 1], [2, 2], [3, 3, 3], [2, 3, 1], [8, 8, 8, 8]])
def test_each_pair_is_measured_once_within_or_between_machines(sizes):
    """In a round between machines, all ranks of a machine send to one other, so that they share its network card."""
    home = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    rounds = rounds_of([[rank for rank, of in enumerate(home) if of == machine] for machine in range(len(sizes))])
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(len(home)), 2)]
    for pairs in rounds:
        assert pairs and len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
        partners = {(home[rank], home[other]) for a, b in pairs for rank, other in ((a, b), (b, a))}
        assert len(partners) == len({machine for machine, _ in partners})
        assert len({a == b for a, b in partners}) == 1


def test_the_page_shows_the_report():
    """Four machines with two GPUs each. One cable, one clock and one driver differ."""
    facts = cluster({}, {"driver": "535.161.08"}, {}, {})
    facts = [RankFacts(one.rank, f"gpu-{one.host}", one.local_rank, True, one.alike, one.free) for one in facts]
    speeds = speeds_of(4, 2, lambda a, b: 0.13 if (a // 2, b // 2) == (2, 0) else 1)
    what, way_out = (
        "its clock is 3,600.7 s ahead of rank 0's",
        "synchronize the clocks (chronyc makestep, or timedatectl)",
    )
    clock = Problem("gpu-d (ranks 6, 7)", what, way_out, machines=["gpu-d"])
    slow = find_slow_links(speeds, {one.rank: one.host for one in facts})
    printed = str(Report(8, "cuda", facts, [*find_differences(facts), clock, *slow], speeds))
    assert f"```\n{printed}\n```" in (ROOT / "docs" / "cluster.md").read_text()


# ---- the command, in real processes ----

GATHER, TRANSFER, TIME = check.gather_facts, check.transfer, time.time
DELAY = 0.05


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def machine(rank, size, port, log, arguments, special):
    """Run the command as the only rank of a machine, as a launcher other than torchrun starts it.

    special: slow_to, stuck_to: send slowly to this rank, or never. clock: seconds ahead. python: another version.
    files: the limit of open files.
    """
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    versions = check.read_versions() | ({"Python": special["python"]} if "python" in special else {})

    def transfer(tensor, source, to, own):
        if own == source and len(tensor) > 8:
            time.sleep({special.get("slow_to"): DELAY, special.get("stuck_to"): 1000}.get(to, 0))
        TRANSFER(tensor, source, to, own)

    check.read_versions, check.transfer = lambda: versions, transfer
    socket.gethostname = lambda: "abcd"[rank]
    time.time = lambda: TIME() + special.get("clock", 0.0)
    if "files" in special:
        resource.setrlimit(resource.RLIMIT_NOFILE, (special["files"], special["files"]))
    code = cli.main(["check", "cluster", "--min-free", "0", *arguments])
    sys.stdout.flush()
    os._exit(code)


def run_machines(ranks, size, tmp_path, *arguments, special=(), port=None):
    """Run the command on some of `size` ranks. special: by rank. Returns exit codes and outputs."""
    port, logs = port or free_port(), [tmp_path / f"{rank}.log" for rank in ranks]
    arguments = ("--out", str(tmp_path), *arguments)
    started = [
        (rank, size, port, log, arguments, dict(special).get(rank, {})) for rank, log in zip(ranks, logs, strict=True)
    ]
    return exits_and_logs(machine, started, logs)


def test_a_throttled_link_and_other_problems_are_named(tmp_path):
    """Messages from rank 1 to rank 2 are delayed in Python, which needs no rights."""
    special = {1: {"slow_to": 2}, 2: {"python": "3.9.1"}, 3: {"clock": 3600.0, "files": 256}}
    codes, texts = run_machines(range(4), 4, tmp_path, "--size", "0.26", "--json", special=special)
    assert codes == [1] * 4 and texts[1:] == [""] * 3, texts  # only rank 0 prints
    result = json.loads(texts[0][texts[0].index("{\n") :])
    problems = [f"{one['where']}: {one['what']}: {one['way_out']}" for one in result["problems"]]
    for said in (
        "c (rank 2): Python 3.9.1, but ",
        "d (rank 3): its clock is 3,600.",
        "d (rank 3): a process may open 256 files, and 4 ranks need 544: ulimit -n 65536",
        "rank 1 on b -> rank 2 on c: ",
    ):
        assert any(line.startswith(said) for line in problems), (said, problems)
    assert any("s ahead of rank 0's: " in line for line in problems)
    assert len(result["links"]) == 12 and len({(link["source"], link["to"]) for link in result["links"]}) == 12
    slowest = min(result["links"], key=lambda link: link["speed"])
    assert (slowest["source"], slowest["to"]) == (1, 2) and slowest["speed"] < 260_000 / DELAY
    assert not [*tmp_path.glob(".check*")] and not any("is not shared with this machine" in line for line in problems)


@pytest.mark.long
def test_a_link_that_does_not_answer_ends_the_check_on_all_ranks(tmp_path):
    arguments = ["--size", "0.001", "--timeout", "5"]
    codes, texts = run_machines(range(3), 3, tmp_path, *arguments, special={1: {"stuck_to": 2}})
    assert codes == [1, 1, 1]
    stuck = "rank 1 on b: rank 1 -> rank 2: no answer for 5 s: check this machine and the network between ranks"
    assert stuck in texts[1], texts


def test_missing_ranks_are_named_in_time(tmp_path):
    codes, (text,) = run_machines([0], 3, tmp_path, "--timeout", "1")
    assert codes == [1] and "error: waited 1 s for 2 of 3 ranks: ranks 1, 2: start them, and look for" in text


@pytest.mark.long
def test_without_rank_0_the_others_end_in_time(tmp_path):
    codes, (log,) = run_machines([1], 2, tmp_path, "--timeout", "0.5", port=(port := free_port()))
    *_, log = log.splitlines()  # torch logs, too, if it was imported before the command
    assert codes == [1]
    assert log.startswith("moe-dualpipe: error: rank 1 on b: connecting to the rendezvous store: ") and str(port) in log


def test_one_process_checks_its_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    assert cli.main(["check", "cluster", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["note"] == "One process: links between ranks were not measured. torchrun starts more."
    assert any("the output folder cannot be written: " in one["what"] for one in found["problems"])
    assert not found["passed"] and found["world_size"] == 1 and not dist.is_initialized()
