"""Ranks that fail or are asked to stop too early: the others end soon and name the rank."""

import os
import re
import signal
import time
from dataclasses import replace

import pytest

from tests.support.killed_runs import Processes, newest
from tests.support.runs import settings


def break_the_package(trainer):
    if trainer.layout.rank == 1:
        trainer.run = replace(trainer.run, text=None)


def interrupt_itself(trainer):
    """After the model is built or loaded, and before there is anything to save."""
    if trainer.layout.rank == 1:
        os.environ["RANK"] = "1"  # as torchrun does
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


FAILED = "rank 1 failed in the start of the run: AttributeError: "


@pytest.mark.parametrize("sabotage,code,own,others", [
    (break_the_package, 1, "Traceback (most recent call last):\n", FAILED),
    (interrupt_itself, 128 + signal.SIGTERM, "train.py: rank 1 stops: SIGTERM before the first step\n",
     "rank 1 vanished"),
])  # fmt: skip
def test_a_rank_that_fails_says_why_and_the_others_name_it(tmp_path, sabotage, code, own, others):
    with Processes(2, settings(tmp_path / "run", seq_len=16), 4.0, sabotage) as run:
        assert run.exit_codes(1, 0) == [code, 1]
        assert own in run.output(1)
        assert f"train.py: rank 0 stops: {others}" in run.output(0) and "Traceback" not in run.output(0)
    assert newest(tmp_path / "run") is None


def raise_error():
    raise ValueError(f"shard {os.getpid()}\nis missing")


def fail_everywhere(trainer):
    trainer.pipeline.step = lambda *_, **__: raise_error()


def test_of_ranks_that_fail_at_the_same_line_of_the_user_one_prints_it(tmp_path):
    with Processes(2, settings(tmp_path / "run", seq_len=16), 4.0, fail_everywhere) as run:
        assert run.exit_codes(0, 1) == [1, 1]
        output = run.output(0) + run.output(1)
    place = r"tests/health/test_failing_ranks.py:\d+ in raise_error \(rank [01]\)"
    [error] = [line for line in output.splitlines() if "train.py" in line]
    assert re.fullmatch(rf"train.py: error: {place}: ValueError: shard \d+ is missing", error)
    assert "Traceback" not in output
