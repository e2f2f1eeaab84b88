"""While a run waits, it prints who waits for whom: for a slow rank, and one that skips a transfer."""

import re
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moe_dualpipe.expert_parallel import AllToAll
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.health.watch import DIAGNOSING_RANKS, Watchdog
from moe_dualpipe.schedule import Forward, members
from tests.support.killed_runs import Processes
from tests.support.runs import settings

TIMEOUT = 8.0
SECONDS = r"\(for \d+ s\)"


def wait_for_lines(run, *expected):
    """Wait until the ranks have printed a line that matches each of `expected`, and that one was printed once."""
    end = time.monotonic() + 40
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


def skip_a_transfer(trainer):
    """Rank 1 leaves out the last transfer of step 2: a dispatch of gradients."""
    all_to_all, calls = AllToAll.all_to_all, []

    def skipping(self, rows, rows_out, rows_in):
        calls.extend([None] * (trainer.progress.step == 2))
        if trainer.layout.rank == 1 and len(calls) == 16:  # 4 per micro-batch
            return AsyncResult([], lambda: rows.new_zeros(sum(rows_in), *rows.shape[1:]))
        return all_to_all(self, rows, rows_out, rows_in)

    setattr(AllToAll, "all_to_all", skipping)  # noqa: B010


@pytest.mark.long
def test_the_rank_that_went_on_without_a_transfer_is_named(tmp_path):
    """And again by the error that ends the run."""
    config = settings(tmp_path / "run", pp=1, ep=2, ep_backend="all_to_all", seq_len=16, batch_size=8, timeout=TIMEOUT)
    with Processes(2, config, sabotage=skip_a_transfer) as run:
        stuck = rf"rank 0 waits in dispatch backward of layer 1 {SECONDS}; rank 1 went on without it"
        after = rf"rank 1 waits for rank 0: gradients of step 2 {SECONDS}"
        wait_for_lines(run, stuck, after)
        assert run.exit_codes(0, 1) == [1, 1]
        ends = [rf"rank {rank} stops: the ranks wait for each other: {stuck}; {after}" for rank in range(2)]
        wait_for_lines(run, stuck, after, *ends)


def slow_save(trainer):
    """Rank 1 sleeps before it takes part in the checkpoint of step 1."""
    check = trainer.check_replicas

    def then_sleep(*checksums):
        check(*checksums)
        if trainer.layout.rank == 1 and trainer.progress.step == 1 and not checksums:
            doze()

    trainer.check_replicas = then_sleep


@pytest.mark.long
def test_a_rank_that_waits_in_a_checkpoint_says_so(tmp_path):
    config = settings(tmp_path / "run", pp=1, seq_len=16, timeout=TIMEOUT, save_every=1, save_async=False)
    with Processes(2, config, sabotage=slow_save) as run:
        wait_for_lines(
            run,
            rf"rank 0 waits for rank 1: checkpoint of step 1 {SECONDS}",
            r"rank 1: in step 1 \(test_stalls.py:\d+ in doze\) for \d+ s",
        )


def test_few_ranks_of_a_large_run_diagnose_that_it_hangs():
    """The others look again later. All of them would read ranks x ranks heartbeats."""
    store, diagnosing = dist.HashStore(), []
    for rank in range(1000):
        watchdog: Any = Watchdog.__new__(Watchdog)  # without a thread
        watchdog.size, watchdog._store, watchdog._checks, watchdog._lost_connection = 1000, store, 1, None
        watchdog._heartbeat = lambda _, rank=rank: diagnosing.append(rank)
        watchdog._stall = SimpleNamespace(describe=lambda _: ["nobody"])
        watchdog._diagnose_hang()
    read = Counter(diagnosing)
    assert len(read) == DIAGNOSING_RANKS and {*read.values()} == {1000}
