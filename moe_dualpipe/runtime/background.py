"""Collectives that run in the background: start them, wait for them later, and measure how long they took.

Exposed time is the time in which a rank waits for collectives and does nothing else. The rest of their duration is
hidden behind other work. On GPUs, collectives are started from a side stream, so that events around them measure their
duration; the host never waits.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..overlap import streams
from ..overlap.annotation import annotation
from ..overlap.waits import wait_for_all

Start = Callable[[], Sequence[dist.Work | None]]
"""Starts collectives, and returns their handles; None from a rank outside the group."""


class Running(Protocol):
    """Collectives that were started together."""

    def wait(self) -> None:
        """After it, the host or the current stream may use the results."""
        ...

    def interval(self) -> tuple[float, float]:
        """Start and end in seconds on any clock. Call it after `wait`; on a GPU, after the collectives have ended."""
        ...


@dataclass(frozen=True, slots=True)
class CollectiveTimes:
    """Seconds. running: while at least one collective ran. exposed: while this rank waited for one."""

    running: float
    exposed: float


class Background:
    """Runs collectives of tensors on `device`, and sums up their times."""

    def __init__(self, device: torch.device):
        self.streams, self.starting = streams.streams_of(device), ""
        self.side = None if self.streams is None else self.streams.Stream(device)
        self._ended: list[Running] = []
        self._waits: list[tuple[Any, Any]] = []

    @contextmanager
    def named(self, text: str) -> Iterator[None]:
        """In this context, collectives start under this name, in profiles and in `starting`."""
        self.starting = text
        try:
            with annotation(text):
                yield
        finally:
            self.starting = ""

    def start(self, start: Start) -> Running:
        """Start collectives. The caller must hold their tensors until `wait`."""
        return _OnHost(start) if self.streams is None else _OnStream(start, self.streams, self.side)

    def wait(self, collectives: Sequence[Running]) -> None:
        before = self._now()
        for running in collectives:
            running.wait()
        self._waits.append((before, self._now()))
        self._ended += collectives

    def take_times(self) -> CollectiveTimes:
        """The times of the collectives that were waited for since the last call. On a GPU, they must have ended."""
        exposed = sum(_seconds(start, end) for start, end in self._waits)
        running = covered([running.interval() for running in self._ended])
        self._ended, self._waits = [], []
        return CollectiveTimes(running, exposed)

    def _now(self) -> Any:
        return perf_counter() if self.streams is None else _event(self.streams)


def covered(intervals: Sequence[tuple[float, float]]) -> float:
    """The length of the union. Example: [(0, 2), (1, 3), (5, 6)] -> 4."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


class _OnHost:
    def __init__(self, start: Start):
        self.began = perf_counter()
        self.works = [work for work in start() if work is not None]
        self.ends = [work.get_future().then(lambda _: perf_counter()) for work in self.works]

    def wait(self) -> None:
        wait_for_all(self.works)

    def interval(self) -> tuple[float, float]:
        return self.began, max((end.wait() for end in self.ends), default=self.began)


class _OnStream:
    """`zero` is an event from which the intervals of a process are measured."""

    zero: Any = None

    def __init__(self, start: Start, device_streams: Any, side: Any):
        self.streams = device_streams
        queued = self.streams.current_stream().record_event()
        with self.streams.stream(side):
            side.wait_event(queued)
            self.began = _event(self.streams)
            for work in start():
                if work is not None:
                    work.wait()  # the side stream waits
            self.ended = _event(self.streams)
        _OnStream.zero = _OnStream.zero or self.began

    def wait(self) -> None:
        self.streams.current_stream().wait_event(self.ended)

    def interval(self) -> tuple[float, float]:
        return _seconds(_OnStream.zero, self.began), _seconds(_OnStream.zero, self.ended)


def _event(device_streams: Any) -> Any:
    return device_streams.current_stream().record_event(device_streams.Event(enable_timing=True))


def _seconds(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


# ---- Reduce-scatter and all-gather of tensors that have one owner each ----
#
# A bucket has the tensors of each rank of a group: `bucket[i]` are those that rank i owns. All ranks pass tensors of
# the same shapes and one dtype. The owners' parts differ in size, because a tensor is not divided
# (runtime/replicas.py).
#
# NCCL runs both for parts of any sizes. gloo makes a reduce-scatter of one all-reduce for each rank, and its all-gather
# needs equal sizes. So on CPUs, an all-to-all sends each part to its owner, which adds the parts in the order of the
# ranks: it sends half as much as an all-reduce, and the sum of an element does not depend on the rest of its bucket.
# The owners broadcast what the others gather.

Bucket = Sequence[Sequence[Tensor]]


class ReduceScatter:
    """Starts to add up the tensors of a bucket over the ranks of `group`."""

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, background: Background):
        self.own, rank, num_copies = bucket[group.rank()], group.rank(), 1 if background.streams else group.size()
        parts = [sum(t.numel() for t in tensors) for tensors in bucket]
        self.flat = torch.cat([t.flatten() for tensors in bucket for t in tensors])
        self.received = self.flat.new_empty(num_copies, parts[rank])  # on a CPU, from each rank

        def start() -> list[dist.Work | None]:
            if background.streams is not None:
                return [dist.reduce_scatter(self.received[0], [*self.flat.split(parts)], group=group, async_op=True)]
            sizes = [parts[rank]] * num_copies
            return [dist.all_to_all_single(self.received.view(-1), self.flat, sizes, parts, group=group, async_op=True)]

        self.running = background.start(start)

    def finish(self) -> None:
        """Write the sums into this rank's tensors. `running` must have been waited for."""
        total, *others = self.received
        for other in others:
            total += other
        _copy(total, self.own)


class AllGather:
    """Starts to send this rank's tensors of a bucket to all ranks of `group`."""

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, background: Background):
        self.bucket, self.rank, self.queued = bucket, group.rank(), background.streams is not None
        own = torch.cat([t.flatten() for t in bucket[self.rank]]) if bucket[self.rank] else None
        some = next(t for tensors in bucket for t in tensors)
        self.flats = [some.new_empty(sum(t.numel() for t in tensors)) for tensors in bucket]
        if own is not None:
            self.flats[self.rank] = own
        self.running = background.start(lambda: self._start(group))

    def _start(self, group: dist.ProcessGroup) -> list[dist.Work | None]:
        if self.queued:
            return [dist.all_gather(self.flats, self.flats[self.rank], group=group, async_op=True)]
        owners = [owner for owner, flat in enumerate(self.flats) if flat.numel()]
        return [dist.broadcast(self.flats[o], group=group, group_src=o, async_op=True) for o in owners]

    def finish(self) -> None:
        """Write what was received into the other ranks' tensors. `running` must have been waited for."""
        for owner, tensors in enumerate(self.bucket):
            if owner != self.rank:
                _copy(self.flats[owner], tensors)


def _copy(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    if tensors:
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_([*tensors], [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])
