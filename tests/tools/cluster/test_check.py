"""Run the whole check in real processes with gloo: it names each problem in time, and every rank ends."""

import dataclasses
import json
import os
import socket
import sys
import time
from contextlib import closing

import pytest

from moe_dualpipe import cli
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.tools.cluster import Options, check_cluster
from moe_dualpipe.tools.cluster.links import Links
from moe_dualpipe.tools.cluster.probes import gather_facts
from moe_dualpipe.tools.cluster.report import cluster_report
from tests.support.ranks import exits_and_logs

SEND = Links._send
DELAY = 0.05


def free_port():
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def enter(rank, size, port, log):
    """Become a rank, as a launcher other than torchrun starts it: rank 0 opens the store."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": "0"}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run_commands(ranks, size, tmp_path, *arguments, port=None):
    """Run the command on some of `size` ranks. Returns exit codes and outputs."""
    port, logs = port or free_port(), [tmp_path / f"{rank}.log" for rank in ranks]
    started = [(rank, size, port, log, arguments) for rank, log in zip(ranks, logs, strict=True)]
    return exits_and_logs(command, started, logs)


def command(rank, size, port, log, arguments):
    enter(rank, size, port, log)
    code = cli.main(["check", "cluster", *arguments])
    sys.stdout.flush()
    os._exit(code)


def machine(rank, size, port, log, out, changes, special):
    """A rank on a machine of its own, whose facts are changed.

    special: slow_to, stuck_to: send slowly to this rank, or never. clock: seconds ahead. options: of the check.
    """
    enter(rank, size, port, log)

    def gather(launch, out, steps):
        name = "abcd"[rank]
        found = gather_facts(launch, out, steps)
        alike = found.alike | changes.get("alike", {})
        return dataclasses.replace(found, host=name, port=None, **changes | {"alike": alike})

    def send(self, tensor, to):
        if to in (special.get("slow_to"), special.get("stuck_to")) and len(tensor) > len(self.answer):
            time.sleep(DELAY if to == special.get("slow_to") else 1000)
        SEND(self, tensor, to)

    Links._send = send
    options = special.get("options", Options(out=out, size=1 << 18, timeout=30, min_free=0))
    ahead = special.get("clock", 0.0)
    outcome = check_cluster(options, Launch(rank, 0, size, 1), gather, now=lambda: time.time() + ahead)
    if outcome.report is not None:
        print(cluster_report(outcome.report))
        print(json.dumps(outcome.report.to_json()), flush=True)
    os._exit(outcome.code)


def run_machines(size, tmp_path, changes, special):
    """Run a rank for each machine. changes, special: by rank. Returns exit codes, problems and the whole result."""
    port, logs = free_port(), [tmp_path / f"{rank}.log" for rank in range(size)]
    arguments = [
        (rank, size, port, logs[rank], tmp_path, changes.get(rank, {}), special.get(rank, {})) for rank in range(size)
    ]
    codes, texts = exits_and_logs(machine, arguments, logs)
    assert all(text == "" for text in texts[1:]), texts  # rank 0 speaks for all
    text, _, result = texts[0].strip().rpartition("\n")
    return codes, [line[2:] for line in text.splitlines() if line.startswith("- ")], json.loads(result)


def test_a_throttled_link_and_other_problems_are_named(tmp_path):
    """Messages from rank 1 to rank 2 are delayed in Python: no rights are needed. test_network.py throttles packets."""
    changes = {2: {"alike": {"Python": "3.9.1"}}, 3: {"open_files": 64}}
    special = {1: {"slow_to": 2}, 3: {"clock": 3600.0}}
    codes, problems, result = run_machines(4, tmp_path, changes, special)
    assert codes == [1] * 4
    for said in (
        "c (rank 2): Python 3.9.1, but ",
        "d (rank 3): its clock is 1.0 h ahead of those of most machines: ",
        "d (rank 3): a process may open 64 files, and 4 ranks need 544: ulimit -n 65536",
        "rank 1 on b -> rank 2 on c: ",
    ):
        assert any(line.startswith(said) for line in problems), (said, problems)
    assert len(result["links"]) == 12 and len({(link["source"], link["to"]) for link in result["links"]}) == 12
    slowest = min(result["links"], key=lambda link: link["speed"])
    assert (slowest["source"], slowest["to"]) == (1, 2) and slowest["speed"] < (1 << 18) / DELAY
    assert not [*tmp_path.glob(".check*")]
    assert [rank["sees_mark"] for rank in result["ranks"]] == [True] * 4


def test_links_are_not_measured_between_versions_of_torch_that_differ(tmp_path):
    codes, problems, result = run_machines(2, tmp_path, {1: {"alike": {"torch": "1.0"}}}, {})
    assert codes == [1, 1] and result["links"] == []
    assert any("torch 1.0, but " in line for line in problems)


def test_a_link_that_does_not_answer_ends_the_check_on_all_ranks(tmp_path):
    options = {"options": Options(size=1000, out=tmp_path, timeout=1, min_free=0)}
    codes, problems, _ = run_machines(3, tmp_path, {}, {0: options, 1: options | {"stuck_to": 2}, 2: options})
    assert codes == [1, 1, 1]
    stuck = [line for line in problems if "rank 1 -> rank 2" in line]
    assert stuck and all("no answer for 1 s: check the network between these ranks" in line for line in stuck), problems


def test_missing_ranks_are_named_in_time(tmp_path):
    codes, (first, second) = run_commands([0, 1], 4, tmp_path, "--timeout", "0.5", "--out", str(tmp_path))
    assert codes == [1, 1] and second == ""
    here = socket.gethostname()
    assert f"- rendezvous: waited 0.5 s for 2 of 4 ranks: ranks 2, 3 (ranks of {here} are here): start them" in first


def test_without_rank_0_the_others_end_in_time(tmp_path):
    port = free_port()
    codes, (log,) = run_commands([1], 2, tmp_path, "--timeout", "0.5", "--out", str(tmp_path), port=port)
    where = f"rank 1 on {socket.gethostname()}: connecting to the rendezvous store"
    assert codes == [1]
    assert log == f"moe-dualpipe: error: {where}: waited 0.5 s for 127.0.0.1:{port}: Connection refused\n"


def test_a_machine_that_does_not_answer_is_named(tmp_path):
    """As a network disk that is gone: the thread that waits for it never returns."""

    def gather(_launch, _out, steps):
        steps.start("writing to /data")
        time.sleep(1000)

    outcome = check_cluster(Options(out=tmp_path, timeout=0.1), Launch(0, 0, 1, 1), gather)
    (problem,) = outcome.report.problems
    assert (outcome.code, outcome.stuck) == (1, True)
    where = f"rank 0 on {socket.gethostname()}"
    assert str(problem) == f"{where}: writing to /data: no answer for 0.1 s: look at this machine first"


@pytest.fixture
def port_in_use(monkeypatch):
    with closing(socket.socket()) as server:
        server.bind(("", 0))
        server.listen()
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        yield server.getsockname()[1]


def test_one_process_checks_its_machine(port_in_use, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("a file")
    assert cli.main(["check", "cluster", "--json", "found.json"]) == 1
    printed = capsys.readouterr().out
    assert "One process: links between ranks were not measured. torchrun starts more.\n" in printed
    problems = [line for line in printed.splitlines() if line.startswith("- ")]
    said = f"- {socket.gethostname()} (rank 0): port {port_in_use} is in use: end the program that ss -ltnp "
    assert any(line.startswith(said) for line in problems), problems
    assert any("the output folder cannot be written: " in line and "not a folder" in line for line in problems)
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["passed"] and len(found["problems"]) == len(problems) and found["ranks"][0]["port"] == port_in_use


@pytest.mark.parametrize(
    "arguments,said",
    [(["--size", "0"], "--size must be at least"), (["--json", "x.txt"], "cannot write 'x.txt': use .json")],
)  # fmt: skip
def test_invalid_options_are_one_line(arguments, said, capsys):
    assert cli.main(["check", "cluster", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"moe-dualpipe: error: {said}")
