"""Process groups between simulated GPUs, with NCCL's rules, and the names that tests replace to use them.

An operation runs on the group's own stream, after the work that is queued on the current stream. `wait` makes the
current stream wait for it. Until then, it holds references to its tensors, as torch does from version 2.7 on.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from moe_dualpipe.overlap import Engine, segmented, streams
from tests.machines.simulated_gpu import Event, SimulatedGpu, SimulatedStream, annotation, current_gpu


class Work:
    def __init__(self, done: Event, held: Sequence[Tensor], arrive: Callable[[], None] | None = None):
        self.done, self.held, self.arrive = done, [*held], arrive

    def wait(self) -> None:
        if self.arrive is not None:
            self.arrive()
        self.done.gpu.current_stream().wait_event(self.done)
        self.held.clear()


def queue(stream: SimulatedStream, operator: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Event:
    gpu = stream.gpu
    stream.wait_event(gpu.current_stream().record_event())
    with gpu.stream(stream):
        gpu.access(operator, reads, writes)
        return stream.record_event()


class MirrorGroup:
    """Rank 0 of `num_ranks` that all send the same rows: what it sends to rank r is also what it receives from r."""

    def __init__(self, num_ranks: int):
        self.num_ranks = num_ranks
        self.stream: SimulatedStream | None = None

    def size(self) -> int:
        return self.num_ranks

    def rank(self) -> int:
        return 0

    def all_to_all(self, output: Tensor, given: Tensor, rows_in: Any, rows_out: Any) -> Work:
        assert rows_in == rows_out
        output.numpy()[:] = given.numpy()
        self.stream = self.stream or current_gpu().Stream(name="nccl")  # type: ignore[union-attr]
        return Work(queue(self.stream, "all_to_all", [given], [output]), [output, given])


class Mailboxes:
    """Messages between the threads of a pipeline's ranks."""

    def __init__(self) -> None:
        self.messages: dict[Any, Any] = {}
        self.changed = threading.Condition()
        self.error: BaseException | None = None

    def put(self, key: Any, message: Any) -> None:
        with self.changed:
            self.messages[key] = message
            self.changed.notify_all()

    def take(self, key: Any) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.messages or self.error, timeout=60)
            if key not in self.messages:
                raise ConnectionError("another rank failed") from self.error
            return self.messages.pop(key)

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()


class LinkGroup:
    """The links of `rank` in one direction. NCCL has a stream for each pair of ranks."""

    def __init__(self, gpu: SimulatedGpu, rank: int, name: str, mailboxes: Mailboxes):
        self.gpu, self.rank, self.name, self.mailboxes = gpu, rank, name, mailboxes
        self.streams: dict[int, SimulatedStream] = {}
        self.started: Counter[tuple[int, int]] = Counter()

    def _stream(self, peer: int) -> SimulatedStream:
        return self.streams.setdefault(peer, self.gpu.Stream(name=f"{self.name} {peer}"))

    def _next_message(self, source: int, to: int) -> tuple[Any, ...]:
        self.started[source, to] += 1
        return self.name, source, to, self.started[source, to]

    def send(self, tensor: Tensor, peer: int) -> Work:
        self.mailboxes.put(self._next_message(self.rank, peer), tensor.numpy().copy())
        return Work(queue(self._stream(peer), "send", [tensor], []), [tensor])

    def receive(self, tensor: Tensor, peer: int) -> Work:
        message = self._next_message(peer, self.rank)

        def arrive() -> None:
            tensor.detach().numpy()[:] = self.mailboxes.take(message)

        return Work(queue(self._stream(peer), "receive", [], [tensor]), [tensor], arrive)


def replace_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, the package finds the simulated GPU of the thread where it would find CUDA."""

    def engine_for(device: torch.device) -> Engine:
        gpu = current_gpu()
        if gpu is None:
            return Engine(device)
        gpu.engine = gpu.engine or Engine(device)
        return gpu.engine

    def all_to_all_single(
        output: Tensor, given: Tensor, rows_in: Any = None, rows_out: Any = None, *, group: Any, async_op: bool
    ) -> Work:
        assert async_op
        return group.all_to_all(output, given, rows_in, rows_out)

    monkeypatch.setattr(streams, "streams_of", current_gpu)
    monkeypatch.setattr(segmented, "engine_for", engine_for)
    for user in ("overlap.engine", "runtime.rank_step", "expert_parallel.exchange"):
        monkeypatch.setattr(f"moe_dualpipe.{user}.annotation", annotation)
    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)
    monkeypatch.setattr(dist, "isend", lambda tensor, peer, group, _tag: group.send(tensor, peer))
    monkeypatch.setattr(dist, "irecv", lambda tensor, peer, group, _tag: group.receive(tensor, peer))


def run_threads(num_ranks: int, mailboxes: Mailboxes, function: Callable[[int, SimulatedGpu], Any]) -> list[Any]:
    """Run `function(rank, gpu)` in a thread with a GPU for each rank. Returns the results, or raises an error."""

    def run(rank: int) -> Any:
        try:
            with SimulatedGpu() as gpu:
                return function(rank, gpu)
        except BaseException as error:
            mailboxes.fail(error)
            raise

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
