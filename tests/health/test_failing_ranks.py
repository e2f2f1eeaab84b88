"""Ranks that fail, are asked to stop too early, or get no answer from the store: all end soon, and say why."""

import os
import re
import signal
import time
from dataclasses import replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.health.watch import joining, watch_ranks
from moe_dualpipe.runtime.groups import init_world
from moe_dualpipe.runtime.launch import Launch
from tests.support import ranks
from tests.support.killed_runs import Processes, newest
from tests.support.ranks import exits_and_logs, started
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


# ---- The machine of the rendezvous store freezes or is cut off: its clients wait in C++ forever ----


def serve(ports):
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    time.sleep(1000)


@pytest.fixture
def server():
    """The process of a store, and its port."""
    ports = ranks._context.SimpleQueue()
    with started(serve, [(ports,)]) as [process]:
        yield process, ports.get()


PATIENCE = 1.5


def wait_end_or_fail(rank, port, log, frozen):
    """Once the store is frozen, one rank waits, one ends its run, and one fails."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3, timeout=timedelta(seconds=60))
    with watch_ranks(timeout=60.0, patience=PATIENCE):
        store.set(f"watched {rank}", "yes")
        while not frozen.exists():
            time.sleep(0.01)
        time.sleep(0.5)  # several checks: the thread that watches waits for an answer
        if rank == 0:
            time.sleep(1000)
        if rank == 1:
            raise ValueError("no such shard: 7")
    dist.destroy_process_group()


def test_ranks_that_get_no_answer_from_the_store_end_whatever_they_do(server, tmp_path):
    """The last heartbeat, and the message to the others, need the store, too."""
    process, port = server
    logs, frozen = [tmp_path / f"{rank}.log" for rank in range(3)], tmp_path / "frozen"

    def freeze_when_watched(_):
        dist.TCPStore("127.0.0.1", port, None, is_master=False).wait([f"watched {rank}" for rank in range(3)])
        os.kill(process.pid, signal.SIGSTOP)
        frozen.touch()

    arguments = [(rank, port, logs[rank], frozen) for rank in range(3)]
    codes, texts = exits_and_logs(wait_end_or_fail, arguments, logs, freeze_when_watched, timeout=30)
    assert codes == [1, 1, 1]
    for rank, text in enumerate(texts):
        assert f"rank {rank} stops: no answer from the rendezvous store on 127.0.0.1:{port} for {PATIENCE} s\n" in text
        assert ("ValueError: no such shard: 7" in text) == (rank == 1)


def join_others(port, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "1", "WORLD_SIZE": "2"}
    os.environ |= agent | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joining(1, timeout=1.0):
        init_world(torch.device("cpu"), Launch(1, 1, 2, 2), timeout=1.0)


def test_a_rank_that_cannot_join_the_others_ends_with_one_line(server, tmp_path):
    """The store does not answer, or the other rank does not come."""
    process, port = server
    os.kill(process.pid, signal.SIGSTOP)
    alone = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ports, logs = (port, alone.port), (tmp_path / "silent", tmp_path / "alone")
    codes, texts = exits_and_logs(join_others, [*zip(ports, logs, strict=True)], logs)
    assert codes == [1, 1]
    for text, port, reason in zip(texts, ports, ("no answer for 1.5 s", "DistStoreError: "), strict=True):
        [printed] = [line for line in text.splitlines() if line.startswith("train.py")]
        line = "train.py: rank 1 stops: it did not join the other ranks at the rendezvous store on 127.0.0.1:"
        assert printed.startswith(f"{line}{port}: {reason}") and "Traceback" not in text
