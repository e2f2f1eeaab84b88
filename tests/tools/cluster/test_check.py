"""`check cluster` names what differs and what is slow, in made-up clusters and in real processes with gloo."""

import json
import os
import re
import socket
import sys
import time

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe import cli
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.tools.cluster import CheckedRank, ClusterReport, Problem, check, check_cluster
from tests.support.ranks import exits_and_logs, run_ranks
from tests.support.runs import ROOT

ALIKE = {"moe-dualpipe": "0.1.0", "torch": "2.11.0", "device": "cuda", "processes per machine": "2", "NCCL": "2.28.9",
         "GPU": "NVIDIA H100 80GB HBM3", "GPU memory": "79 GiB", "NCCL_IB_TC": "106"}  # fmt: skip


def cluster(*changes):
    """Facts of machines a, b, c ... with two ranks each. changes: what differs on each machine."""
    return [
        CheckedRank(rank, f"gpu-{'abcd'[rank // 2]}", ALIKE | changes[rank // 2]) for rank in range(2 * len(changes))
    ]


def links_of(machines, slow=lambda _a, _b: 1.0):
    """Speeds of all links of machines with two ranks: 340 GB/s within a machine, 46 between, times `slow`."""
    pairs = [(a, b) for a in range(2 * machines) for b in range(2 * machines) if a != b]
    speeds = {(a, b): slow(a, b) * (340 if a // 2 == b // 2 else 46) * (1 + (a * 8 + b) / 6400) for a, b in pairs}
    return [{link: speed for link, speed in speeds.items() if (link[0] // 2 == link[1] // 2) == same}
            for same in (True, False)]  # fmt: skip


# ---- machines ----


@pytest.mark.parametrize("change,what", [
    ({"torch": "2.13.0"}, "torch 2.13.0, but 2.11.0 on 4 other ranks: use the same"),
    ({"GPU": "NVIDIA A100"}, "GPU NVIDIA A100, but NVIDIA H100 80GB HBM3 on 4 other ranks"),
    ({"NCCL_IB_TC": "none"}, "NCCL_IB_TC none, but 106 on 4 other ranks"),
])  # fmt: skip
def test_a_machine_that_differs_is_named(change, what):
    ((name, problem),) = check.find_differences(cluster({}, change, {}))
    assert str(problem).startswith(f"gpu-b (ranks 2, 3): {what}") and {name} == change.keys()


FAULTS = {
    "used GPU": ({"gpus": 2, "free": 50}, "29% of the memory of its GPU is in use: end the other program"),
    "no folder": ({"out": "file/new"}, "file cannot be written: choose another output folder with --out"),
    "full disk": ({"min_free": 2**60}, "the run needs 1.15292e+09 GB: delete old runs"),
}


@pytest.mark.parametrize("machine,what", FAULTS.values(), ids=FAULTS)
def test_a_machine_with_a_fault_is_named(monkeypatch, tmp_path, machine, what):
    gpu = type("Properties", (), {"name": "NVIDIA H200"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (machine["free"], 70))
    monkeypatch.setattr(torch.cuda, "nccl", type("nccl", (), {"version": lambda: (2, 28, 9)}), raising=False)
    monkeypatch.setenv("NCCL_IB_TC", "106")
    for name in ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_TOPO_FILE", "NCCL_IB_HCA"):
        monkeypatch.setenv(name, "differs between machines")
    (tmp_path / "file").touch()
    device = torch.device("cuda" if "gpus" in machine else "cpu")
    out, min_free = tmp_path / machine.get("out", "new"), machine.get("min_free", 0)
    facts = check.gather_facts(Launch(2, 0, 4, 2), out, min_free, device)
    (problem,) = facts.problems
    assert what in str(problem) and problem.where == f"rank 2 on {socket.gethostname()}"
    assert facts.alike["NCCL_IB_TC"] == "106" and "differs between machines" not in facts.alike.values()


# ---- speeds ----

SLOW = {
    "none": (4, lambda *_: 1, 0),
    "one link": (4, lambda a, b: 0.1 if (a, b) == (1, 2) else 1, 1),
    "a slow machine of three": (3, lambda a, b: 0.1 if 1 in (a // 2, b // 2) and a // 2 != b // 2 else 1, 16),
    "one direction of two machines": (2, lambda a, b: 0.1 if a < 2 <= b else 1, 4),
    "within a machine": (2, lambda a, b: 0.1 if (a, b) == (2, 3) else 1, 1),
}


@pytest.mark.parametrize("machines,slow,number", SLOW.values(), ids=SLOW)
def test_slow_links_are_named(machines, slow, number):
    facts, kinds = (
        cluster(*[{}] * machines),
        dict(zip((check._WITHIN, check._BETWEEN), links_of(machines, slow), strict=True)),
    )
    expected = {link for speeds in kinds.values() for link in speeds if slow(*link) < 1}
    places = [problem.where for kind, speeds in kinds.items() for problem in check.find_slow(kind, speeds, facts)]
    assert len(expected) == number and len(places) == min(number, check.MOST_NAMED)
    assert {*places} <= {check.place(link, facts) for link in expected}


def test_a_product_is_compared_with_other_ranks_and_with_the_peak_of_its_gpu():
    facts, slow = (
        cluster({}),
        Problem("rank 0 on gpu-a", "product, TFLOP/s: 290, and 700 is usual", check._KINDS[check._PRODUCT]),
    )
    assert [*check.find_slow(check._PRODUCT, {(0,): 290.0, (1,): 700.0}, facts)] == [slow]
    assert [one.what for one in check.find_slow(check._PRODUCT, {(0,): 290.0}, facts)] == [
        "product, TFLOP/s: 290, and 593.6 is usual"
    ]
    assert [*check.find_slow(check._PRODUCT, {(0,): 290.0}, cluster({"GPU": "unknown"}))] == []


def test_the_page_shows_the_report():
    facts = cluster({}, {"NCCL_IB_TC": "0"}, {}, {})
    within, between = links_of(4, lambda a, b: 0.13 if (a, b) == (4, 0) else 1)
    products = {(rank,): 742.0 - rank - 370 * (rank == 6) for rank in range(8)}
    memory = {(rank,): 2921.0 + rank for rank in range(8)}
    speeds = {check._PRODUCT: products, check._MEMORY: memory, check._WITHIN: within, check._BETWEEN: between}
    slow = [problem for kind in speeds for problem in check.find_slow(kind, speeds[kind], facts)]
    printed = str(ClusterReport(facts, [*(one for _, one in check.find_differences(facts)), *slow], speeds))
    assert f"```\n{printed}\n```" in (ROOT / "docs" / "cluster.md").read_text()


# ---- real processes ----

DELAY, SEND = 0.05, dist.batch_isend_irecv


def measure_slowly(rank, seconds):
    """Check machines with a rank each. Messages from rank 1 to rank 2 take `seconds` longer: no rights needed."""

    def send(operations):
        ((operation,), message) = operations, operations[0].tensor
        if rank == 1 and operation.op is dist.isend and operation.peer == 2 and message.nbytes > 8:
            time.sleep(seconds)
        return SEND(operations)

    socket.gethostname, dist.batch_isend_irecv = lambda: "abcd"[rank], send
    check.REPEATS, size = 2, dist.get_world_size()
    check.__version__ = "0.0.9" if size == 2 and rank == 1 else check.__version__
    return check_cluster(Launch(rank, 0, size, 1), size=260_000, timeout=60, min_free=0, device="cpu")


def test_a_throttled_link_is_named_on_all_ranks_and_ranks_of_other_versions_are_not_measured():
    for report in run_ranks(4, measure_slowly, DELAY):
        links = report.speeds[check._BETWEEN]
        assert len(links) == 12 and min(links, key=links.__getitem__) == (1, 2)
        assert links[1, 2] < 260_000 / DELAY / check.GB
        assert any(str(problem).startswith("rank 1 on b -> rank 2 on c: links") for problem in report.problems)
        assert (
            report.to_json()["links"][0].keys() == {"source", "to", "speed"} and len(report.speeds[check._MEMORY]) == 4
        )
    report, _ = run_ranks(2, measure_slowly, 0)
    assert (
        report.note == "Links were not measured: first solve the problems below." and not report.speeds[check._BETWEEN]
    )
    assert any(str(problem).startswith("b (rank 1): moe-dualpipe 0.0.9, but ") for problem in report.problems)


def command(rank, size, port, log):
    """Run the command, and write what it says to `log`. A process alone measures its machine forever."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    variables = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port} if port else {}
    os.environ |= {name: str(value) for name, value in variables.items()}
    sys.argv, check.PATIENCE = ["moe-dualpipe", "check"], 0.5 if size == 1 else 30
    check.measure_machine = lambda _: time.sleep(1000)
    os._exit(cli.main(["check", "cluster", "--timeout", "1", "--min-free", "0"]))


ALONE = "does not reach the other ranks: "
WAY_OUT = ": check MASTER_ADDR and MASTER_PORT, which torchrun sets, and that all ranks start"


@pytest.mark.parametrize("rank,size,address,code,said", [
    (0, 2, False, 2, f"rank 0 {ALONE}Error initializing torch.distributed using env:// rendezvous: .*{WAY_OUT}"),
    (0, 2, True, 2, f"rank 0 {ALONE}Timed out after 2 seconds waiting for clients. 1/2 clients joined{WAY_OUT}"),
    (1, 2, True, 2, f"rank 1 {ALONE}The client socket has timed out after 1000ms while trying to .*{WAY_OUT}"),
    (0, 1, False, 1, "rank 0 on .*: measuring a product and a copy: no answer for 1.5 s: check this machine .*"),
], ids=["no address", "missing rank", "unreachable address", "stuck"])  # fmt: skip
def test_what_takes_too_long_ends_with_one_line(tmp_path, rank, size, address, code, said):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = address and probe.getsockname()[1]
    codes, (text,) = exits_and_logs(command, [(rank, size, port, tmp_path / "log")], [tmp_path / "log"])
    (error,) = [line for line in text.splitlines() if line.startswith("moe-dualpipe: error: ")]
    assert codes == [code] and re.fullmatch(f"moe-dualpipe: error: {said}", error), text


def test_one_process_checks_its_machine(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    assert cli.main(["check", "cluster", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["note"] == "One process: links between ranks were not measured. torchrun starts more."
    assert any("runs cannot be written: " in f"{one['what']}: " for one in found["problems"])
    assert not found["passed"] and found["world_size"] == 1 and not dist.is_initialized()
    assert found["ranks"][0]["product"] > 0 and found["ranks"][0]["memory"] > 0
