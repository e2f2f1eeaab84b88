"""torchrun with a range of machines, which are network namespaces: one is lost, comes back, and another is added.

Each machine has its own network card, host name and process ids. A machine that is lost is cut off and then killed, so
the others get no packet that says so.
"""

import contextlib
import itertools
import json
import re
import sys
import time

import pytest

from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.options import parse_arguments
from tests.support import machines
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, SMALL, losses, make_trainer, records

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(machines.why_not()), reason=machines.why_not())]

NOTES_SEQUENCES = """
import json, time
from moe_dualpipe.commands.train import main
from moe_dualpipe.data import TextData
from moe_dualpipe.training.step import Trainer

draw, do_step = TextData.batch, Trainer.step

def slowly(self, step):
    time.sleep(0.1)
    if self.layout.rank == 0:
        with open("processes.jsonl", "a") as file:
            file.write(json.dumps([step + 1, self.layout.pp * self.layout.dp]) + "\\n")
    return do_step(self, step)

def noted(self, seed, step, count, seq_len, rows):
    batch = draw(self, seed, step, count, seq_len, rows)
    with open(f"sequences-{len(rows)}-{rows.start}.jsonl", "a") as file:
        file.write(json.dumps([step + 1, rows.start, batch[0].tolist()]) + "\\n")
    return batch

TextData.batch, Trainer.step = noted, slowly
main()
"""
CONF = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=60"
LAUNCH = [
    *("torchrun", "--nnodes", "2:4", "--nproc-per-node", 1, "--max-restarts", 3, "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", f"{machines.address(5)}:29400", "--rdzv-conf", CONF),
]
OPTIONS = [
    *(*SMALL, "--set", "checkpoint.save_async=false"),
    "model.experts_per_token=8",  # all of them: no choice depends on rounding
    *("--pp", 1, "--steps", 1000, "--batch-size", 12, "--save-every", 5, "--sample-tokens", 0),
    *("--device", "cpu", "--timeout", 6, "--log-every", 1, "--keep", 0),
]  # fmt: skip


class Run(machines.Machines):
    """An elastic run in `folder` on some machines, and the store of the rendezvous on another one."""

    def __init__(self, holder, folder):
        super().__init__(holder, folder)
        (folder / "train.py").write_text(NOTES_SEQUENCES)
        self.start(5, [sys.executable, ROOT / "examples" / "rendezvous_store.py", 29400])

    def start_ranks(self, *which):
        for i in which:
            words = [*LAUNCH, "--local-addr", machines.address(i), "train.py", *OPTIONS, "--out", "run"]
            self.start(i, words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")

    def attempts(self):
        """The number of processes of each attempt, with the steps that it began."""
        with contextlib.suppress(OSError):
            begun = map(json.loads, (self.folder / "processes.jsonl").read_text().splitlines())
            grouped = itertools.groupby(begun, lambda entry: entry[1])
            return [(processes, [step for step, _ in entries]) for processes, entries in grouped]
        return []

    def wait_for(self, processes, more=8):
        """Wait until this number of processes has done more steps."""
        end = time.monotonic() + 150
        while not any(now == processes and len(steps) > more for now, steps in self.attempts()[-1:]):
            assert time.monotonic() < end, "\n".join(self.log(i) for i in self.processes)
            time.sleep(0.1)


def undisturbed(rank, arguments, steps):
    """The records of a run of these steps, and the sequences of each step."""
    config = parse_arguments([str(a) for a in arguments])
    trainer = make_trainer(rank, config)
    stop = lambda trainer, record: record["step"] == steps and trainer.request_stop()  # noqa: E731
    train_loop(trainer, callbacks=[stop], verbose=False)
    draws = [trainer.text.batch(0, step, 12, config.batch.seq_len)[0] for step in range(steps)]
    return records(config.checkpoint.out), [[*map(tuple, draw.tolist())] for draw in draws]


def lines(text, pattern):
    return [line for line in text.splitlines() if re.search(pattern, line)]


@pytest.mark.timeout(900)
def test_a_run_goes_on_when_its_first_machine_is_lost_and_comes_back_and_another_is_added(tmp_path):
    """Three machines; without the one of rank 0; with it again; with a fourth, the new first, until it leaves."""
    with machines.switch() as holder, contextlib.closing(Run(holder, tmp_path)) as run:
        run.start_ranks(1, 2, 3)
        run.wait_for(3)
        run.lose(1)
        run.wait_for(2)
        run.start_ranks(1)
        run.wait_for(3)
        run.start_ranks(0)
        run.wait_for(4)
        run.signal(0)
        run.exit_code(0)
        run.wait_for(3)
        for i in range(1, 4):
            run.signal(i)
        for i in range(1, 4):
            run.exit_code(i)
        logs = [run.log(i) for i in range(4)]
    found = records(tmp_path / "run")
    done = max(losses(found))
    (expected, sequences), *_ = run_ranks(
        3, undisturbed, [*OPTIONS, "--save-every", 0, "--out", tmp_path / "whole"], done, timeout=400
    )
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert {*losses(found, "tokens").values()} == {12 * 32}
    attempts = run.attempts()
    assert [processes for processes, _ in attempts] == [3, 2, 3, 4, 3]
    second = attempts[1][1][0]
    for step in range(1, second):
        assert losses(found)[step] == losses(expected)[step]
    read = {}
    for file in tmp_path.glob("sequences-*.jsonl"):
        for step, first, rows in map(json.loads, file.read_text().splitlines()):
            assert [*map(tuple, rows)] == sequences[step - 1][first : first + len(rows)]
            read.setdefault(step, []).extend(range(first, first + len(rows)))
    assert sorted(read) == [*range(1, done + 1)] and all({*rows} == {*range(12)} for rows in read.values())
    repeated = {step for step, rows in read.items() if len(rows) > 12}
    assert repeated <= {*range(second, second + 6)}  # only those after the last checkpoint
    for machine, processes in enumerate(([4], [3, 3, 3], [2], [])):  # of the attempts whose rank 0 is on this machine
        assert [*map(int, re.findall("^1f1b over 1 pipeline x ([0-9]) ", logs[machine], re.MULTILINE))] == processes
    for log in logs[1:]:
        assert len(lines(log, "exits: another machine is leaving; torchrun will restart the remaining ranks$")) == 1
    for log in logs[2:]:
        lost, *_ = lines(log, "^train.py: rank [0-9] stops: ")
        assert "no answer from the rendezvous store on 10.77.0.2:" in lost  # it was in the process of rank 0
