"""Each rank watches the next one, so that a rank that dies or hangs ends the run within seconds and is named.

A collective operation waits in C++ for a dead rank, and its error names a neighbor rather than the rank that failed.
So a thread on every rank writes a heartbeat to the rendezvous store and reads that of the next rank: two keys a second,
for any number of ranks. Under torchrun the store belongs to the launcher and outlives every rank. The first rank that
detects a failure writes it to the store; every rank reads it, prints it and exits. A rank that gets no answer from the
store exits, too: the machine of the store is cut off, or this one is.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist

from ..errors import error_text, fault_of, in_context, out_of_files
from .heartbeat import SAVING, CodePosition, Heartbeat, Progress, describe_waits, pid_namespace
from .report import Deadline, end_process, program_name, report_error

PATIENCE = 10.0
"""Seconds without a heartbeat until a rank counts as dead; at most half of the timeout."""
DIAGNOSING_RANKS = 4
"""Number of ranks that read all heartbeats when a run hangs. If all ranks did, a large run would flood the store."""
_FAILURE, _DIAGNOSES = "failure", "diagnoses"
_T = TypeVar("_T")


@contextmanager
def watch_ranks(timeout: float, patience: float = PATIENCE, full_traceback: bool = False) -> Iterator[Progress]:
    """Watch the ranks of the default group. Yields the Progress in which the main thread notes what it does.

    timeout: seconds without progress until the run counts as hanging. patience: see PATIENCE. After an exception the
    process exits with code 1. The rank that failed first prints the error (`error_text`); of the others, those that
    failed at the same line print nothing, and the rest one line with the name of that rank. full_traceback: print
    tracebacks of a user's errors, too. A single process is not watched.
    """
    progress, alone = Progress(), dist.get_world_size() == 1
    patience, attempt = min(patience, timeout / 2), _attempt_id()
    silence = f"rank {dist.get_rank()} stops: no answer from the rendezvous store{_address()} for {patience:g} s"
    with nullcontext() if alone else Deadline(patience, silence) as answers:
        watchdog = answers and Watchdog(progress, timeout, patience, f"watch/{attempt}", answers)
        try:
            yield progress
        except Exception as error:
            # Without the frame of this function: it did not call what failed.
            error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
            if progress.step:
                in_context(error, f"step {progress.step}")
            if watchdog:
                watchdog.fail(error, full_traceback)
            report_error(error_text(error, program_name(), full_traceback))
            raise SystemExit(1) from error
        finally:
            if watchdog:
                watchdog.close()


@contextmanager
def joining(rank: int, timeout: float) -> Iterator[None]:
    """Inside this context, `rank` joins the others. It exits with code 1 if that takes over `timeout` seconds."""
    failed = f"rank {rank} stops: it did not join the other ranks at the rendezvous store{_address()}"
    limit = timeout + min(PATIENCE, timeout / 2)  # the timeout is for torch, which reports what it waited for
    with Deadline(limit, f"{failed}: no answer for {limit:g} s"):
        try:
            yield
        except (RuntimeError, ValueError) as error:
            end_process(1, f"{program_name()}: {failed}: {out_of_files(error) or _first_line(error)}\n")


@dataclass(frozen=True, slots=True)
class RankFailure:
    """What ended the run. `rank` is the rank that failed, or None if no single rank did.

    fault: equal for ranks of one machine that failed at the same line of the user's code; "" for other failures.
    """

    rank: int | None
    text: str
    fault: str = ""


class Unchanged:
    """Counts the checks in which a value stayed the same."""

    def __init__(self) -> None:
        self.value: object = None
        self.checks = 0

    def check(self, value: object) -> int:
        """Call once in each check. Returns the number of checks since the value changed."""
        self.checks = self.checks + 1 if value == self.value else 0
        self.value = value
        return self.checks


class Watchdog:
    """Watches the next rank from a thread, which starts with the object and renews `answers` as the store answers."""

    def __init__(self, progress: Progress, timeout: float, patience: float, prefix: str, answers: Deadline):
        self.progress, self.patience, self._answers = progress, patience, answers
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.interval = min(1.0, patience / 20)
        self._until_read = 2 * self.interval  # a store on this machine must live until the others have read the failure
        # Time is counted in checks, so the time during which a machine was suspended does not count.
        self.max_silent, self.max_still = patience / self.interval, 0.9 * timeout / self.interval
        self._checks = self._disconnected = 0
        self._still, self._place, self._save, self._silent = Unchanged(), Unchanged(), Unchanged(), Unchanged()
        self._next = (self.rank + 1) % self.size
        self._failing: BaseException | None = None
        self._lost_connection: BaseException | None = None
        # One client per thread. Not the default client: it blocks while a process group is created.
        clients = [dist.distributed_c10d._get_default_store().clone() for _ in range(2)]  # type: ignore[attr-defined]
        self._main_store, self._store = (dist.PrefixStore(prefix, client) for client in clients)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop. A last heartbeat tells the others not to expect more."""
        self._closing.set()
        self._thread.join()

    def fail(self, error: Exception, full_traceback: bool = False) -> NoReturn:
        """End this process because of `error`, or because of the failure that broke the connection."""
        in_context(error, f"rank {self.rank}")
        if _is_lost_connection(error):
            self._lost_connection = error
            time.sleep(self.patience + 4 * self.interval)  # the thread ends the process when it knows the cause
        signal.set_wakeup_fd(-1)  # this rank ends now: it need not report a signal of the launcher
        self._failing = error
        fault = fault_of(error)
        fault = fault and f"{pid_namespace()} {fault}"
        own = RankFailure(self.rank, f"failed in {self.progress}: {_first_line(error)}", fault)
        published: list[RankFailure] = []
        publisher = threading.Thread(target=lambda: published.append(self._publish(self._main_store, own)), daemon=True)
        publisher.start()
        publisher.join(self._until_read)  # the store may not answer
        first = published[0] if published else own
        if first.rank not in (None, self.rank) and (first.fault == fault or not fault):  # that rank prints its error
            after = f"{program_name()}: rank {self.rank} {own.text}, after rank {first.rank} {first.text}\n"
            end_process(1, "" if fault else after)
        report_error(error_text(error, program_name(), full_traceback))
        publisher.join()
        end_process(1, seconds=self._until_read)

    # ---- The thread ----

    def _watch(self) -> None:
        try:
            # Before the first wait: other ranks need the process id if this rank dies early.
            self._send_heartbeat(ended=False)
            while not self._closing.wait(self.interval):
                self._send_heartbeat(ended=False)
                if failure := self._published() or self._detect():
                    self._exit(self._publish(self._store, failure))
                self._answers.renew()
            self._send_heartbeat(ended=True)
        except RuntimeError as error:
            if not self._closing.is_set():
                self._exit(RankFailure(None, f"the launcher is gone: no connection to the rendezvous store: {error}"))

    def _send_heartbeat(self, ended: bool) -> Heartbeat:
        progress, code = self.progress, CodePosition.of_main_thread()
        self._checks += 1
        self._still.check((progress.count, *code.instruction))
        seconds = self._place.check(progress.place) * self.interval
        # A rank whose own disk hangs still counts as saving: it names itself, and the others leave that to it.
        moving = self._save.check(progress.saves) <= self.max_still or bool(progress.saving)
        saving = progress.phase == SAVING and moving
        beat = Heartbeat.of(progress, code, seconds, count=self._checks, ended=ended, saving=saving)
        if self._lost_connection is not None:
            beat = replace(beat, waiting=True)
        self._store.set(str(self.rank), msgspec.json.encode(beat).decode())
        return beat

    def _published(self) -> RankFailure | None:
        return self._read(_FAILURE, RankFailure)

    @staticmethod
    def _publish(store: dist.Store, failure: RankFailure) -> RankFailure:
        """Write `failure` to the store unless it holds one already. Returns the one in the store."""
        found = store.compare_set(_FAILURE, "", msgspec.json.encode(failure).decode())
        return msgspec.json.decode(found, type=RankFailure)

    def _exit(self, failure: RankFailure) -> None:
        if failure.fault and self._failing is None:
            time.sleep(self.interval)  # this rank may come to the same line
        # Otherwise the main thread prints its error.
        if self._failing is None or (failure.rank != self.rank and not failure.fault):
            who = "" if failure.rank is None else f"rank {failure.rank} "
            end_process(1, f"{program_name()}: rank {self.rank} stops: {who}{failure.text}\n", self._until_read)

    def _heartbeat(self, rank: int) -> Heartbeat | None:
        return self._read(str(rank), Heartbeat)

    def _read(self, key: str, kind: type[_T]) -> _T | None:
        """The value of a key, as JSON: others may write to the store, and a pickle can run code."""
        return msgspec.json.decode(self._store.get(key), type=kind) if self._store.check([key]) else None

    def _detect(self) -> RankFailure | None:
        """The failure that this check finds, if any."""
        if failure := self._check_next():
            return failure
        if self.progress.saving and self._save.checks > self.max_still:
            return RankFailure(self.rank, f"hangs in a checkpoint save, {self.progress.saving}")
        self._disconnected += self._lost_connection is not None
        # + 1: _check_next names a silent rank first
        if self._still.checks > self.max_still or self._disconnected > self.max_silent + 1:
            return self._diagnose_hang()
        return None

    def _check_next(self) -> RankFailure | None:
        """Check that the next rank is alive. If it has ended in order, watch the one after it from now on."""
        rank, beat = self._next, self._heartbeat(self._next)
        if beat is not None and beat.process_is_gone():
            beat = self._heartbeat(rank)  # its last heartbeat may be newer than the one that was read
            if beat is not None and not beat.ended:
                return RankFailure(rank, f"vanished, last seen in {beat.position}: its process {beat.pid} is gone")
        silent = self._silent.check(beat.count if beat is not None else 0)
        if beat is not None and beat.ended:
            self._next, self._silent = (rank + 1) % self.size, Unchanged()
        elif silent > self.max_silent:
            where = f", last seen in {beat.position}" if beat is not None else ""
            return RankFailure(rank, f"vanished: no sign of life for {self.patience:g} s{where}")
        return None

    def _diagnose_hang(self) -> RankFailure | None:
        """This rank makes no progress: blame a rank that has ended, or else one that does not wait for others.

        None: other ranks diagnose it; or they wait for a checkpoint, which the disk of some rank still writes.
        """
        if self._store.add(_DIAGNOSES, 1) % self.size >= DIAGNOSING_RANKS:
            return None  # these may fail, so this rank asks again at the next check
        read = {rank: self._heartbeat(rank) for rank in range(self.size)}
        beats = {rank: beat for rank, beat in read.items() if beat is not None}
        if any(beat.saving for beat in beats.values()) and self._lost_connection is None:
            self._still.checks //= 2  # look again later
            return None
        ended = {rank: beat for rank, beat in beats.items() if beat.ended}
        suspects = ended or {rank: beat for rank, beat in beats.items() if not beat.waiting}
        if len(suspects) == 1:
            ((rank, beat),) = suspects.items()
            return RankFailure(rank, f"{'exited' if ended else 'hangs'} in {beat.position}, and others wait for it")
        positions = [f"rank {rank} is in {beat.position}" for rank, beat in (suspects or beats).items()]
        why = f" ({_first_line(self._lost_connection)})" if self._lost_connection is not None else ""
        waits = "; ".join(describe_waits(read) or positions)
        return RankFailure(None, f"the ranks wait for each other{why}: {waits}")


def _attempt_id() -> int:
    """A random number of this attempt: the launcher's store still holds the failure of the last one. Collective."""
    number = torch.tensor(int.from_bytes(os.urandom(7)))
    dist.broadcast(number, 0)
    return int(number)


def _address() -> str:
    """Where the rendezvous store is, such as " on 10.77.0.1:29500"; "" if no launcher says so."""
    found = [os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    return f" on {':'.join(found)}" if found else ""


def _is_lost_connection(error: Exception) -> bool:
    """Whether `error` only says that other ranks cannot be reached."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
