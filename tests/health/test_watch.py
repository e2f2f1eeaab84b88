"""What the thread of a rank finds out about the others. Time is a number of checks, which these tests make."""

import os
import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from moe_dualpipe.health import report, watch
from moe_dualpipe.health.heartbeat import SAVING, Heartbeat, Progress, pid_namespace
from moe_dualpipe.health.report import Deadline
from moe_dualpipe.health.watch import RankFailure, Unchanged, Watchdog

SILENT, STILL = 20, 90
"""With a check every half second: a patience of 10 s, and nine tenths of a timeout of 50 s."""
WAITING, BUSY = Heartbeat("step 3, 1F2", waiting=True, pid=1), Heartbeat("step 3, 0F1", pid=1)


def beat(count, state=WAITING, **changes):
    return replace(state, count=count, **changes)


class Thread(Watchdog):
    """Checks only when it is told to."""

    def _watch(self):
        pass


@pytest.fixture
def rank_0(monkeypatch):
    """The watchdog of rank 0 of four, and the heartbeats that it reads."""
    store = dist.HashStore()
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    shared = SimpleNamespace(clone=lambda: store)
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: shared)
    found = Thread(Progress(), STILL / 0.9 / 2, SILENT / 2, "watch", Deadline(1, ""))
    beats = {rank: beat(1) for rank in range(4)}
    found._heartbeat = beats.get  # type: ignore[method-assign]
    assert (found.interval, found.max_silent, found.max_still) == (0.5, SILENT, STILL)
    return found, beats


def test_a_rank_is_dead_after_its_patience_of_consecutive_silent_checks(rank_0):
    watchdog, beats = rank_0
    for check in range(10 * SILENT):  # one heartbeat arrives late
        beats[1] = beat(check - check % SILENT, BUSY)
        assert watchdog._detect() is None
    assert [watchdog._detect() for _ in range(2)][-1] == RankFailure(
        1, "vanished: no sign of life for 10 s, last seen in step 3, 0F1"
    )


def test_after_a_rank_has_ended_the_next_one_gets_the_whole_patience(rank_0):
    """Also if its heartbeat has the count of the one before it."""
    watchdog, beats = rank_0
    for _ in range(SILENT + 1):
        assert watchdog._detect() is None
    beats[1] = replace(beats[1], ended=True)
    for _ in range(SILENT + 2):
        assert watchdog._detect() is None
    assert watchdog._detect() == RankFailure(2, "vanished: no sign of life for 10 s, last seen in step 3, 1F2")


def test_a_process_that_is_gone_has_vanished_unless_it_ended_between_two_reads(rank_0):
    watchdog, beats = rank_0
    gone = beat(4, BUSY, pid=2**22 + 1, pid_namespace=pid_namespace() or pytest.skip("needs /proc"))
    read = iter([gone, replace(gone, count=5, ended=True)])
    watchdog._heartbeat = lambda _: next(read)
    assert watchdog._detect() is None and watchdog._next == 2
    watchdog._heartbeat, beats[2] = beats.get, gone
    assert watchdog._detect() == RankFailure(2, f"vanished, last seen in step 3, 0F1: its process {gone.pid} is gone")


class Attack:
    def __reduce__(self):
        return os.putenv, ("ATTACKED", "yes")


@pytest.mark.parametrize("key,read", [("failure", "_published"), ("1", "_heartbeat")])
def test_what_a_stranger_writes_to_the_store_is_not_run(rank_0, key, read):
    watchdog, _ = rank_0
    watchdog._store.set(key, pickle.dumps(Attack()))
    with pytest.raises(ValueError):
        getattr(type(watchdog), read)(watchdog, *([1] if key == "1" else []))


def test_a_heartbeat_and_a_failure_are_read_as_they_were_written(rank_0):
    watchdog, _ = rank_0
    sent = watchdog._send_heartbeat(ended=True)
    assert Watchdog._heartbeat(watchdog, 0) == sent and Watchdog._heartbeat(watchdog, 3) is None
    first, second = RankFailure(None, "é", "at line 1"), RankFailure(2, "later")
    assert [watchdog._publish(watchdog._store, one) for one in (first, second)] == [first, first]
    assert watchdog._published() == first


STUCK = "the ranks wait for each other: "


@pytest.mark.parametrize("changed,failure", [
    ({2: beat(9, BUSY)}, RankFailure(2, "hangs in step 3, 0F1, and others wait for it")),
    ({1: beat(9, BUSY), 2: beat(9, WAITING, ended=True)},
     RankFailure(2, "exited in step 3, 1F2, and others wait for it")),
    ({1: beat(9, BUSY), 2: beat(9, BUSY)},
     RankFailure(None, f"{STUCK}rank 1 is in step 3, 0F1; rank 2 is in step 3, 0F1")),
    ({}, RankFailure(None, STUCK + "; ".join(f"rank {rank} is in step 3, 1F2" for rank in range(4)))),
    ({3: beat(9, WAITING, saving=True)}, None),  # the disk of a rank still writes
], ids=["busy", "ended", "two", "none", "saving"])  # fmt: skip
def test_who_is_blamed_when_nothing_moves(rank_0, changed, failure):
    watchdog, beats = rank_0
    beats |= changed
    watchdog._still.checks = STILL
    assert watchdog._diagnose_hang() == failure
    assert watchdog._still.checks == (STILL if failure else STILL // 2)


def saves(watchdog, checks, every):
    """Checks during which the disk operation changes with every Nth one. Returns the first failure, and its check."""
    with watchdog.progress.during(SAVING):
        for check in range(checks):
            if check % every == 0:
                watchdog.progress.note_save(f"writing {check}")
            own = watchdog._send_heartbeat(ended=False)
            assert own.saving and not own.waiting  # others leave it to this rank to name itself
            watchdog._silent, watchdog._still = Unchanged(), Unchanged()
            if failure := watchdog._detect():
                return check, failure
    return None


def test_a_disk_that_hangs_in_a_save_is_named_by_its_own_rank_and_a_slow_one_is_not(rank_0):
    watchdog, _ = rank_0
    assert saves(watchdog, 5 * STILL, every=STILL) is None
    assert saves(watchdog, 5 * STILL, every=9 * STILL) == (
        STILL + 1, RankFailure(0, "hangs in a checkpoint save, writing 0")
    )  # fmt: skip


def test_few_ranks_of_a_large_run_diagnose_that_it_hangs(rank_0):
    """The others look again later. All of them would read ranks x ranks heartbeats."""
    watchdog, _ = rank_0
    watchdog.size, read = 1000, []
    watchdog._heartbeat = read.append  # type: ignore[method-assign]
    for _ in range(1000):
        watchdog._diagnose_hang()
    assert len(read) == watch.DIAGNOSING_RANKS * 1000


@pytest.mark.parametrize(
    "renewed,ends", [(range(0, 500, 20), 500), ((5,), 25), ((), 21)], ids=["always", "once", "never"]
)
def test_a_deadline_ends_the_process_after_20_checks_without_an_answer(monkeypatch, renewed, ends):
    checks = []

    def wait(_seconds):
        checks.append(len(checks) + 1)
        if checks[-1] in renewed:
            limit.renew()
        return False

    def end_process(code, text):
        raise SystemExit(f"{code} {text}")

    monkeypatch.setattr(report, "end_process", end_process)
    limit: Any = Deadline(1.0, "no answer")
    limit._over = SimpleNamespace(wait=wait)
    with pytest.raises(SystemExit, match=r"^1 .*: no answer\n$"):
        limit._count()
    assert len(checks) == ends
