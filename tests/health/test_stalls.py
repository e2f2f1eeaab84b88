"""While a run waits, it prints who waits for whom: for a slow rank, and one that skips a transfer."""

import re
import time

import pytest

from moe_dualpipe.schedule import Forward, members
from tests.support.killed_runs import Processes
from tests.support.runs import settings

TIMEOUT = 40.0
SECONDS = r"\(for \d+ s\)"


def wait_for_lines(run, *expected):
    """Wait until the ranks have printed a line that matches each of `expected`, and that one was printed once."""
    end = time.monotonic() + 80
    while True:
        lines = [line for log in run.logs if log.exists() for line in log.read_text().splitlines()]
        counts = [sum(re.fullmatch(f".*train.py: {text}", line) is not None for line in lines) for text in expected]
        if all(counts):
            assert counts == [1] * len(expected), "\n".join(lines)
            return
        assert time.monotonic() < end, "\n".join(lines)
        time.sleep(0.05)


def doze():
    time.sleep(1000)


def slow(trainer):
    """Rank 1 sleeps in the experts of layer 1, in step 2."""
    layer = trainer.stages[1].layers["1"].mlp
    run_experts = layer.run_experts

    def run(*arguments, **options):
        action = trainer.progress.action
        if trainer.layout.rank == 1 and trainer.progress.step == 2 and Forward(1, 3) in members(action):
            doze()
        return run_experts(*arguments, **options)

    layer.run_experts = run


@pytest.mark.long
def test_those_who_wait_for_a_slow_rank_say_for_what(tmp_path):
    """Rank 1 is in a forward of micro-batch 3. A member of its expert group waits, and so do other pipeline ranks."""
    config = settings(tmp_path / "run", pp=2, ep=2, seq_len=16, batch_size=8, timeout=TIMEOUT)
    with Processes(4, config, sabotage=slow) as run:
        wait_for_lines(
            run,
            rf"rank 0 waits for rank 1: combine forward of layer 1 {SECONDS}",
            rf"rank 2 waits for rank 0: gradients for stage 0, micro-batch 3 {SECONDS}",
            rf"rank 3 waits for rank 1: gradients for stage 0, micro-batch 3 {SECONDS}",
            r"rank 1: in step 2, \(1F3;0B0\)OVERLAP_F_B, mlp forward of layer 1 "
            r"\(test_stalls.py:\d+ in doze\) for \d+ s",
        )
