"""Run tasks in the workers of a Ray cluster. Each one is an actor with one CPU, and keeps its tokenizer and open file.

The package and the files of the sources must be on every machine, at the same place. Results come back through Ray's
object store, and this process writes them, so only this machine needs the output folder.
"""

import dataclasses
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ..messages import printable
from .engines import ONE_THREAD, Pool, Reply, run_task
from .tasks import Setup, Task, Worker


class RemoteWorker:
    """What runs in the cluster."""

    def __init__(self):
        self._worker: Worker | None = None

    def set_up(self, setup: Setup) -> None:
        self._worker = Worker(setup)

    def run(self, task: Task) -> Reply:
        assert self._worker is not None
        return run_task(task, self._worker)


class _Actor:
    """A `RemoteWorker`, as this process sees it."""

    def __init__(self, library: Any):
        self._remote = library.remote(num_cpus=1, runtime_env={"env_vars": ONE_THREAD})(RemoteWorker).remote()
        self._setup: Setup | None = None
        self.task: int | None = None
        self.reply: Any = None  # Ray's reference to it

    def send(self, number: int, setup: Setup, task: Task) -> None:
        if self._setup is not setup:
            self._remote.set_up.remote(dataclasses.replace(setup, same_machine=False))
            self._setup = setup
        self.reply, self.task = self._remote.run.remote(task), number


class Ray(Pool[_Actor]):
    """Runs tasks in the Ray cluster that RAY_ADDRESS names or that runs on this machine, or else in a new one here.

    limit: of workers; None for the CPUs of the cluster. Raises ValueError if Ray is not installed or not reachable.
    """

    def __init__(self, limit: int | None):
        try:
            self._library: Any = import_module("ray")
        except ImportError:
            raise ValueError("--engine ray needs the ray library: pip install 'moe-dualpipe[ray]'") from None
        self._was_connected = self._library.is_initialized()
        if not self._was_connected:
            try:
                self._library.init(log_to_driver=False, logging_level="ERROR")
            except Exception as error:  # Ray raises many kinds
                raise ValueError(f"--engine ray: no cluster: {printable(str(error).partition(chr(10))[0])}") from None
        super().__init__(limit or max(int(self._library.cluster_resources().get("CPU", 1)), 1))

    def start(self) -> _Actor:
        return _Actor(self._library)

    def finished(self, busy: list[_Actor]) -> Iterable[tuple[_Actor, Reply]]:
        by_reply = {worker.reply: worker for worker in busy}
        ready, _ = self._library.wait([*by_reply], num_returns=1)
        for reply in ready:
            try:
                yield by_reply[reply], self._library.get(reply)
            except self._library.exceptions.RayError as error:
                reason = printable(str(error).strip().partition("\n")[0])
                raise ChildProcessError(f"a Ray worker failed: {reason}") from None

    def close(self) -> None:
        self.workers.clear()  # actors end with their last reference
        if not self._was_connected:
            self._library.shutdown()
