"""The command on machines in network namespaces, where the kernel drops the packets of one link."""

import os
import sys

import pytest

from moe_dualpipe import cli
from tests.support import namespaces
from tests.support.ranks import exits_and_logs

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(namespaces.why_not()), reason=namespaces.why_not())]


def node(rank, size, folder, log, arguments):
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    namespaces.enter_machine(rank, folder)
    namespaces.environment(rank, size)
    code = cli.main(["check", "cluster", "--out", str(folder), *arguments])
    sys.stdout.flush()
    os._exit(code)


def run_nodes(size, folder, limits, *arguments):
    """Returns the exit codes and the problems."""
    logs = [folder / f"{rank}.log" for rank in range(size)]
    ranks = [(rank, size, folder, logs[rank], arguments) for rank in range(size)]
    with namespaces.switch() as holder:
        codes, texts = exits_and_logs(
            node, ranks, logs, lambda processes: namespaces.connect(holder, processes, folder, limits)
        )
    return codes, [line[2:] for line in texts[0].splitlines() if line.startswith("- ")]


def test_machines_that_cannot_reach_each_other_are_named(tmp_path):
    codes, problems = run_nodes(3, tmp_path, {(1, 2): "none"}, "--size", "0.1", "--timeout", "3")
    assert codes == [1] * 3
    names = [line.partition(": no answer for 3 s: check the network between")[0] for line in problems]
    assert names == [f"rank {r} on node-{'abc'[r]}: creating the process group" for r in (1, 2)]
