"""Run the whole check in real processes with gloo: it names each problem in time, and every rank ends."""

import dataclasses
import json
import os
import resource
import socket
import sys
import time
from contextlib import closing

import pytest
import torch.distributed as dist

from moe_dualpipe import cli
from moe_dualpipe.tools.cluster import check
from moe_dualpipe.tools.cluster.links import Links
from tests.support.ranks import exits_and_logs

GATHER, TRANSFER, TIME = check.gather_facts, Links._transfer, time.time
DELAY = 0.05


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def machine(rank, size, port, log, arguments, special):
    """Run the command as a rank on a machine of its own, as a launcher other than torchrun starts it.

    special: slow_to, stuck_to: send slowly to this rank, or never. clock: seconds ahead. python: another version.
    files: the limit of open files.
    """
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def gather(*given):
        found = GATHER(*given)
        changes = {"Python": special["python"]} if "python" in special else {}
        return dataclasses.replace(found, host="abcd"[rank], alike={**found.alike, **changes})

    def transfer(self, operation, tensor, peer):
        if (
            operation is dist.isend
            and peer in (special.get("slow_to"), special.get("stuck_to"))
            and len(tensor) > len(self.answer)
        ):
            time.sleep(DELAY if peer == special.get("slow_to") else 1000)
        TRANSFER(self, operation, tensor, peer)

    check.gather_facts, Links._transfer = gather, transfer
    time.time = lambda: TIME() + special.get("clock", 0.0)
    if "files" in special:
        resource.setrlimit(resource.RLIMIT_NOFILE, (special["files"], special["files"]))
    code = cli.main(["check", "cluster", "--min-free", "0", *arguments])
    sys.stdout.flush()
    os._exit(code)


def run_machines(ranks, size, tmp_path, *arguments, special=(), port=None):
    """Run the command on some of `size` ranks. special: by rank. Returns exit codes, outputs and rank 0's problems."""
    port, logs = port or free_port(), [tmp_path / f"{rank}.log" for rank in ranks]
    arguments = ("--out", str(tmp_path), *arguments)
    started = [
        (rank, size, port, log, arguments, dict(special).get(rank, {})) for rank, log in zip(ranks, logs, strict=True)
    ]
    codes, texts = exits_and_logs(machine, started, logs)
    return codes, texts, [line[2:] for line in texts[0].splitlines() if line.startswith("- ")]


def test_a_throttled_link_and_other_problems_are_named(tmp_path):
    """Messages from rank 1 to rank 2 are delayed in Python, which needs no rights."""
    special = {1: {"slow_to": 2}, 2: {"python": "3.9.1"}, 3: {"clock": 3600.0, "files": 256}}
    codes, texts, _ = run_machines(range(4), 4, tmp_path, "--size", "0.26", "--json", special=special)
    result = json.loads(texts[0][texts[0].index("{\n") :])
    problems = [f"{one['where']}: {one['what']}: {one['way_out']}" for one in result["problems"]]
    assert codes == [1] * 4 and texts[1:] == [""] * 3  # rank 0 speaks for all
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
    assert not [*tmp_path.glob(".check*")]
    assert [rank["sees_mark"] for rank in result["ranks"]] == [True] * 4


@pytest.mark.long
def test_a_link_that_does_not_answer_ends_the_check_on_all_ranks(tmp_path):
    arguments = ["--size", "0.001", "--timeout", "1"]
    codes, _, problems = run_machines(range(3), 3, tmp_path, *arguments, special={1: {"stuck_to": 2}})
    assert codes == [1, 1, 1]
    stuck = [line for line in problems if "rank 1 -> rank 2" in line]
    assert stuck and all("no answer for 1 s: check the network between these ranks" in line for line in stuck), problems


def test_missing_ranks_are_named_in_time(tmp_path):
    codes, (text,), (problem,) = run_machines([0], 3, tmp_path, "--timeout", "1")
    assert codes == [1] and "Links were not measured" in text
    assert problem.startswith("rendezvous: waited 1 s for 2 of 3 ranks: ranks 1, 2 (ranks of a are here): start them")


@pytest.mark.long
def test_without_rank_0_the_others_end_in_time(tmp_path):
    codes, (log,), _ = run_machines([1], 2, tmp_path, "--timeout", "0.5", port=(port := free_port()))
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
    assert not found["passed"] and found["world_size"] == 1
