"""Each rank watches another, so that a rank that dies or hangs ends the run, by name and soon.

A collective operation waits in C++ for a rank that will never come, and when the connection breaks it says so of
whichever rank was next in the ring. So a thread on every rank writes a sign of life to the rendezvous store, which
under torchrun belongs to the launcher and survives every rank, and reads that of the next rank: two keys a second,
however many ranks there are. The first to know whom to blame writes a verdict; every rank reads it, prints it
and exits.
"""

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from .heartbeat import Beat, Place, Progress, home

PATIENCE = 10.0  # seconds; or half of the timeout, if that is less
_VERDICT = "verdict"


@contextmanager
def watching(timeout: float, patience: float = PATIENCE) -> Iterator[Progress]:
    """Watch the ranks of the default group; the main thread notes where it is in what is yielded.

    timeout: seconds without any movement after which the run counts as hanging. patience: seconds without a sign of
    life after which a rank counts as gone; at most half of the timeout. An exception ends this process with exit code
    1, after its traceback, or after the name of the rank that caused it. A process on its own is not watched.
    """
    progress = Progress()
    if dist.get_world_size() == 1:
        yield progress
        return
    watch = Watch(progress, timeout, min(patience, timeout / 2))
    try:
        yield progress
    except Exception as error:
        watch.fail(error)
    finally:
        watch.close()


@dataclass(frozen=True, slots=True)
class Verdict:
    """Who ended the run, and how; `rank` is None where that is nobody in particular."""

    rank: int | None
    text: str


class Watch:
    """The watch of this rank over the next one. Starts its thread at once."""

    def __init__(self, progress: Progress, timeout: float, patience: float):
        self.progress, self.patience = progress, patience
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.interval = min(1.0, patience / 20)
        # Silence and standstill are counted in looks: a machine that slept for an hour blames nobody.
        self.silent_looks, self.still_looks = patience / self.interval, 0.9 * timeout / self.interval
        self._looks = self._silent = self._still = self._broken_looks = 0
        self._next, self._heard, self._exact = (self.rank + 1) % self.size, -1, (0, 0, 0)
        self._failing: BaseException | None = None
        self._broken: BaseException | None = None
        self._home = home()
        store, run = dist.distributed_c10d._get_default_store(), _token()
        # One client for the main thread, one for the watching one: the default one blocks while a group is created.
        self._main, self._store = (
            dist.PrefixStore(f"watch/{run}", store.clone())  # type: ignore[attr-defined]
            for _ in range(2)
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye. The others no longer expect a sign of life."""
        self._closing.set()
        self._thread.join()

    def fail(self, error: Exception) -> NoReturn:
        """End this process with `error`, or, where that only says that a connection broke, with the cause of it."""
        if _is_a_broken_link(error):
            self._broken = error
            time.sleep(self.patience + 4 * self.interval)  # the thread ends the process when it knows whom to blame
        self._failing = error
        self._accuse(self._main, Verdict(self.rank, f"failed in {self.progress}: {_first_line(error)}"))
        sys.stderr.write("".join(traceback.format_exception(error)))  # in one piece: other processes write there, too
        sys.stderr.flush()
        time.sleep(2 * self.interval)  # a store that this rank hosts must live until the others have read it
        os._exit(1)  # not by way of destructors: they may wait for ranks that are gone

    # ---- The thread ----

    def _watch(self) -> None:
        try:
            while not self._closing.wait(self.interval):
                self._say(ended=False)
                if verdict := self._verdict() or self._suspect():
                    self._leave(self._accuse(self._store, verdict))
            self._say(ended=True)
        except RuntimeError as error:
            if not self._closing.is_set():
                self._leave(Verdict(None, f"the launcher is gone, or whoever keeps the rendezvous store: {error}"))

    def _say(self, ended: bool) -> None:
        place = Place.now()
        exact = (self.progress.count, *place.exact)
        self._still = self._still + 1 if exact == self._exact else 0
        self._looks, self._exact = self._looks + 1, exact
        where, waiting = f"{self.progress} ({place.text})", place.waiting or self._broken is not None
        beat = Beat(self._looks, where, waiting, ended, self._home, os.getpid())
        self._store.set(str(self.rank), beat.dumps())

    def _verdict(self) -> Verdict | None:
        return Verdict(**json.loads(self._store.get(_VERDICT))) if self._store.check([_VERDICT]) else None

    @staticmethod
    def _accuse(store: dist.Store, verdict: Verdict) -> Verdict:
        """Make it the verdict, unless there is one already; the one that counts."""
        text = json.dumps({"rank": verdict.rank, "text": verdict.text})
        return Verdict(**json.loads(store.compare_set(_VERDICT, "", text)))

    def _leave(self, verdict: Verdict) -> None:
        if self._failing is None or verdict.rank != self.rank:  # else the main thread is about to print its traceback
            who = "" if verdict.rank is None else f"rank {verdict.rank} "
            os.write(2, f"train.py: rank {self.rank} stops: {who}{verdict.text}\n".encode())
            os._exit(1)  # the main thread may be stuck in C++

    def _beat(self, rank: int) -> Beat | None:
        return Beat.loads(self._store.get(str(rank))) if self._store.check([str(rank)]) else None

    def _suspect(self) -> Verdict | None:
        """Whom to blame after this look; None while all is well."""
        if verdict := self._gone():
            return verdict
        self._broken_looks += self._broken is not None
        if self._still > self.still_looks or self._broken_looks > self.silent_looks:
            return self._hanging()
        return None

    def _gone(self) -> Verdict | None:
        """Has the next rank vanished, or fallen silent? One that said goodbye is passed over from now on."""
        rank, beat = self._next, self._beat(self._next)
        if beat is not None and beat.process_is_gone():
            beat = self._beat(rank)  # its last word may have come after the one that was read first
            if beat is not None and not beat.ended:
                return Verdict(rank, f"vanished, last seen in {beat.where}: its process {beat.pid} is gone")
        heard = beat.count if beat is not None else 0
        self._silent = self._silent + 1 if heard == self._heard else 0
        self._heard = heard
        if beat is not None and beat.ended:
            self._next, self._heard = (rank + 1) % self.size, -1
        elif self._silent > self.silent_looks:
            where = f", last seen in {beat.where}" if beat is not None else ""
            return Verdict(rank, f"vanished: no sign of life for {self.patience:g} s{where}")
        return None

    def _hanging(self) -> Verdict:
        """Nothing moves here any more: the ranks that have left, or else those that do not wait for others."""
        beats = {rank: beat for rank in range(self.size) if (beat := self._beat(rank)) is not None}
        ended = {rank: beat for rank, beat in beats.items() if beat.ended}
        suspects = ended or {rank: beat for rank, beat in beats.items() if not beat.waiting}
        if len(suspects) == 1:
            ((rank, beat),) = suspects.items()
            return Verdict(rank, f"{'left' if ended else 'hangs'} in {beat.where}, and others wait for it")
        places = "; ".join(f"rank {rank} is in {beat.where}" for rank, beat in (suspects or beats).items())
        why = f" ({_first_line(self._broken)})" if self._broken is not None else ""
        return Verdict(None, f"the ranks do not come together{why}: {places}")


def _token() -> int:
    """A number of this attempt's own: the launcher's store still holds the verdict of the last one. Collective."""
    token = torch.tensor(int.from_bytes(os.urandom(7)))
    dist.broadcast(token, 0)
    return int(token)


def _is_a_broken_link(error: Exception) -> bool:
    """Whether this says only that other ranks could not be reached."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".split("\n")[0]
