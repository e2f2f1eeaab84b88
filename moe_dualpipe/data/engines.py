"""Run tasks in this process, or in worker processes on this machine, and return their results in order.

Workers are started as new programs rather than forked: a fork would inherit the threads of the tokenizer library and of
torch, and `multiprocessing` would import the caller's main program again. Each one has a socket to this process and one
thread. It ends when the socket closes, so also if this process is killed.
"""

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, Protocol, TypeVar

from .tasks import Setup, Task, Worker
from .tokenizer import Tokenizer

ONE_THREAD = {
    "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
    "ARROW_IO_THREADS": "1",
}  # fmt: skip
Reply = tuple[bool, Any]  # whether the task succeeded, and its result or the error
_START = "import sys; sys.path[:] = {path!r}; from moe_dualpipe.data.engines import serve; serve({descriptor})"


class Engine(Protocol):
    """Runs tasks."""

    def map(self, setup: Setup, tokenizer: Tokenizer | None, tasks: Iterable[Task]) -> Iterator[Any]:
        """Yield the result of each task, in order. An error is raised when its turn comes.

        tokenizer: that of `setup`, or None if it has none.
        """
        ...

    def close(self) -> None: ...


class InProcess:
    """Runs tasks in this process, one after the other."""

    def map(self, setup: Setup, tokenizer: Tokenizer | None, tasks: Iterable[Task]) -> Iterator[Any]:
        worker = Worker(setup, tokenizer)
        for task in tasks:
            with threads(1):
                result = task.run(worker)
            yield result

    def close(self) -> None:
        pass


class PoolWorker(Protocol):
    """A process that runs one task at a time. task: the number of the task that it runs, None if it is free."""

    task: int | None

    def send(self, number: int, setup: Setup, task: Task) -> None: ...


W = TypeVar("W", bound=PoolWorker)


class Pool(Generic[W]):
    """Runs tasks in up to `limit` workers, started when there is work for them."""

    def __init__(self, limit: int):
        self._limit = limit
        self.workers: list[W] = []

    def start(self) -> W:
        raise NotImplementedError

    def finished(self, busy: list[W]) -> Iterable[tuple[W, Reply]]:
        """Wait until one or more of these workers have finished, and return what they reply."""
        raise NotImplementedError

    def map(self, setup: Setup, tokenizer: Tokenizer | None, tasks: Iterable[Task]) -> Iterator[Any]:
        waiting = enumerate(tasks)
        replies: dict[int, Reply] = {}
        ahead = 2 * self._limit + 2  # results that wait for an earlier one, so that memory is bounded
        following = next(waiting, None)
        first = 0
        while following or first in replies or any(worker.task is not None for worker in self.workers):
            while following and following[0] < first + ahead and (worker := self._free_worker()):
                worker.send(following[0], setup, following[1])
                following = next(waiting, None)
            if first in replies:
                succeeded, result = replies.pop(first)
                if not succeeded:
                    raise result
                first += 1
                yield result
                continue
            for worker, reply in self.finished([worker for worker in self.workers if worker.task is not None]):
                assert worker.task is not None
                replies[worker.task] = reply
                worker.task = None

    def _free_worker(self) -> W | None:
        for worker in self.workers:
            if worker.task is None:
                return worker
        if len(self.workers) == self._limit:
            return None
        self.workers.append(self.start())
        return self.workers[-1]


class _Process:
    """A worker process on this machine."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        with theirs:
            start = _START.format(path=[path or os.getcwd() for path in sys.path], descriptor=theirs.fileno())
            self.process = subprocess.Popen(
                [sys.executable, "-c", start], env=os.environ | ONE_THREAD, stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self.connection = Connection(ours.detach())
        self.task: int | None = None
        self._setup: Setup | None = None

    def send(self, number: int, setup: Setup, task: Task) -> None:
        try:
            if self._setup is not setup:
                self.connection.send(setup)
                self._setup = setup
            self.connection.send(task)
        except OSError:
            raise self.ended() from None
        self.task = number

    def receive(self) -> Reply:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self.ended() from None

    def ended(self) -> OSError:
        """The error for a worker that has ended by itself."""
        code = self.process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        hint = "; if memory is short, use fewer --workers" if code == -signal.SIGKILL else ""
        return ChildProcessError(f"a worker process {how}{hint}")


class Processes(Pool[_Process]):
    """Runs tasks in processes on this machine."""

    def start(self) -> _Process:
        return _Process()

    def finished(self, busy: list[_Process]) -> Iterable[tuple[_Process, Reply]]:
        by_connection: dict[Any, _Process] = {worker.connection: worker for worker in busy}
        for connection in wait([*by_connection]):
            yield by_connection[connection], by_connection[connection].receive()

    def close(self) -> None:
        for worker in self.workers:
            worker.connection.close()
            if worker.task is not None:  # after an error
                worker.process.kill()
        for worker in self.workers:
            worker.process.wait()
        self.workers.clear()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Let the tokenizers library use this number of threads in this process. It heeds numbers above 1 only once."""
    chosen = {"TOKENIZERS_PARALLELISM": "true" if number > 1 else "false"}
    if number > 1:
        chosen["RAYON_NUM_THREADS"] = str(number)
    before = {name: os.environ.get(name) for name in chosen}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def serve(descriptor: int) -> None:
    """Run the tasks that arrive on a socket until it closes: the main function of a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the main process too, which then closes the socket
    connection, worker = Connection(descriptor), None
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if isinstance(message, Setup):
                worker = Worker(message)
                continue
            assert worker is not None
            connection.send(run_task(message, worker))


def run_task(task: Task, worker: Worker) -> Reply:
    """Run a task. What is returned can be sent to another process."""
    try:
        return True, task.run(worker)
    except (ValueError, OSError) as error:
        return False, error
    except MemoryError:
        return False, MemoryError("a worker process ran out of memory: use fewer --workers")
    except BaseException:
        return False, RuntimeError(f"a worker process failed:\n{traceback.format_exc()}")
