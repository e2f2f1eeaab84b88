"""The machine of the rendezvous store freezes or is cut off: its clients wait in C++ forever, but the ranks end."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.health.watch import joining, watch_ranks
from moe_dualpipe.runtime.groups import init_world
from moe_dualpipe.runtime.launch import Launch
from tests.support import ranks
from tests.support.ranks import exits_and_logs


def serve(ports):
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    time.sleep(1000)


def wait_in_step(progress, _store):
    progress.step = 3
    time.sleep(1000)


def watched_rank(rank, port, log, action):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    with watch_ranks(timeout=60.0, patience=1.0) as progress:
        store.set(f"watched {rank}", "yes")
        action(progress, store)
    dist.destroy_process_group()


@pytest.fixture
def server():
    """The process of a store, and its port."""
    ports = ranks._context.SimpleQueue()
    process = ranks._context.Process(target=serve, args=(ports,), daemon=True)
    process.start()
    yield process, ports.get()
    process.kill()
    process.join()


def exit_codes(port, folder, action, freeze):
    """Start two ranks, call `freeze` when both are watched, and return their exit codes."""
    logs = [folder / f"{rank}.log" for rank in range(2)]

    def freeze_when_watched(processes):
        dist.TCPStore("127.0.0.1", port, None, is_master=False).wait(["watched 0", "watched 1"])
        freeze(processes)

    arguments = [(rank, port, logs[rank], action) for rank in range(2)]
    return exits_and_logs(watched_rank, arguments, logs, freeze_when_watched, timeout=30)


def test_ranks_that_get_no_answer_from_the_store_end(server, tmp_path):
    process, port = server
    codes, logs = exit_codes(port, tmp_path, wait_in_step, lambda _: os.kill(process.pid, signal.SIGSTOP))
    assert codes == [1, 1]
    for rank, log in enumerate(logs):
        silence = f"train.py: rank {rank} stops: no answer from the rendezvous store on 127.0.0.1:{port} for 1 s\n"
        assert log == silence


def end(_progress, _store):
    time.sleep(0.5)


def fail(_progress, _store):
    time.sleep(0.5)
    raise ValueError("no such shard: 7")


@pytest.mark.parametrize("action", [end, fail])
def test_ranks_that_end_or_fail_do_not_wait_for_the_store(server, tmp_path, action):
    """The last heartbeat, and the message to the others, need the store, too."""
    process, port = server
    codes, logs = exit_codes(port, tmp_path, action, lambda _: os.kill(process.pid, signal.SIGSTOP))
    assert codes == [1, 1]
    for log in logs:
        assert "no answer from the rendezvous store" in log
        assert ("ValueError: no such shard: 7" in log) == (action is fail)


def joining_rank(port, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "RANK": "1", "WORLD_SIZE": "2"}
    os.environ |= agent | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with joining(1, timeout=1.0):
        init_world(torch.device("cpu"), Launch(1, 1, 2, 2), timeout=1.0)


@pytest.mark.parametrize("frozen,reason", [(True, "no answer for 1.5 s"), (False, "DistStoreError: ")])
def test_a_rank_that_cannot_join_the_others_ends_with_one_line(server, tmp_path, frozen, reason):
    """The store does not answer, or the other rank does not come."""
    process, port = server
    if frozen:
        os.kill(process.pid, signal.SIGSTOP)
    rank = ranks._context.Process(target=joining_rank, args=(port, tmp_path / "log"), daemon=True)
    rank.start()
    rank.join(30)
    rank.kill()
    assert rank.exitcode == 1
    line = "train.py: rank 1 stops: it did not join the other ranks at the rendezvous store on 127.0.0.1:"
    (printed,) = [text for text in (tmp_path / "log").read_text().splitlines() if text.startswith("train.py")]
    assert printed.startswith(f"{line}{port}: {reason}")
    assert "Traceback" not in (tmp_path / "log").read_text()
