"""Ranks that are killed, hang, fail or exit: the others end soon and name the rank."""

import os
import random
import re
import signal
import time
from dataclasses import replace

import pytest

from tests.support.killed_runs import Processes, newest
from tests.support.ranks import run_ranks
from tests.support.runs import change, losses, settings, train


@pytest.mark.long
def test_a_run_that_is_killed_at_random_moments_gives_the_same_results(tmp_path):
    """Each time the other rank exits and names the killed one, and the run resumes from its newest checkpoint."""
    chance = random.Random(5)
    small = {"steps": 8, "seq_len": 16, "eval_sequences": 1, "save_every": 1}
    config = settings(tmp_path / "killed", **small)
    for victim in (0, 1):
        with Processes(2, change(config, resume=newest(config.checkpoint.out))) as run:
            run.wait_for_steps(chance.randint(1, 2))
            time.sleep(chance.uniform(0, 0.1))
            run.kill(victim)
            assert run.exit_codes(victim, 1 - victim) == [-signal.SIGKILL, 1]
            assert f"train.py: rank {1 - victim} stops: rank {victim} vanished, last seen in " in run.output(1 - victim)
            assert f": its process {run.processes[victim].pid} is gone\n" in run.output(1 - victim)
            assert "Traceback" not in run.output(1 - victim)
    last = run_ranks(2, train, change(config, resume=newest(config.checkpoint.out)))[0]
    whole = run_ranks(2, train, settings(tmp_path / "whole", **small))[0]
    for kind in ("loss", "grad_norm"):
        assert losses(last, kind) == losses(whole, kind)
    assert losses(last, "validation_loss")[8] == losses(whole, "validation_loss")[8]


@pytest.mark.long
def test_a_suspended_rank_counts_as_dead(tmp_path):
    """Its connections stay open, so the main thread of the other rank is stuck in C++. No stall is reported before."""
    with Processes(2, settings(tmp_path / "run", steps=1000, seq_len=16, timeout=60.0)) as run:
        run.wait_for_steps(1)
        run.kill(1, signal.SIGSTOP)
        assert run.exit_codes(0) == [1]
        seen = r"rank 1 vanished: no sign of life for 10 s, last seen in (step \d+|the start of the run)"
        assert re.search(seen, run.output(0)) and " waits for " not in run.output(0)


def failing(trainer):
    """An error of the package itself."""
    if trainer.layout.rank == 1:
        trainer.run = replace(trainer.run, text=None)


def test_a_rank_that_fails_prints_its_traceback_and_the_others_the_error(tmp_path):
    with Processes(2, settings(tmp_path / "run", seq_len=16), sabotage=failing) as run:
        assert run.exit_codes(0, 1) == [1, 1]
        assert "Traceback (most recent call last):\n" in run.output(1) and "\nAttributeError: " in run.output(1)
        assert "train.py: rank 0 stops: rank 1 failed in the start of the run: AttributeError: " in run.output(0)
        assert "Traceback" not in run.output(0)


def raise_error():
    raise ValueError(f"shard {os.getpid()}\nis missing")


def failing_everywhere(trainer):
    trainer.pipeline.step = lambda *_, **__: raise_error()


def test_of_ranks_that_fail_at_the_same_line_of_the_user_one_prints_it(tmp_path):
    with Processes(2, settings(tmp_path / "run", seq_len=16), sabotage=failing_everywhere) as run:
        assert run.exit_codes(0, 1) == [1, 1]
        errors = [line for rank in (0, 1) for line in run.output(rank).splitlines() if "train.py" in line]
        assert all("Traceback" not in run.output(rank) for rank in (0, 1))
    place = r"tests/health/test_failing_ranks.py:\d+ in raise_error \(rank [01]\)"
    assert len(errors) == 1 and re.fullmatch(rf"train.py: error: {place}: ValueError: shard \d+ is missing", errors[0])
