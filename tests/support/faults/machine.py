"""Runs the programs of all ranks against one clock, and records when everything happened.

A model of what CUDA documents, no more: calls of a host take time and only append to streams; a stream runs its work in
order; hardware queues start work in the order of its launch, and what cannot start yet blocks what is behind it; a
transfer occupies its stream from the moment its rank joins and moves data once all ranks have joined; computation and
transfers slow one another down while they share a device.
"""

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import inf
from typing import NamedTuple

from .program import (
    COMPUTE,
    Await,
    Begin,
    Call,
    Collective,
    End,
    Graph,
    Item,
    Job,
    Kernel,
    Machine,
    Op,
    Python,
    Record,
)  # fmt: skip

_NO_TIME = 1e-7


class DeviceSpan(NamedTuple):
    op: Kernel | Collective
    start: float
    end: float
    stream: int
    correlation: int


class HostSpan(NamedTuple):
    """what: "annotation", "step", "module", "operator", "comms" (the call of a collective) or "runtime"."""

    what: str
    name: str
    start: float
    end: float
    correlation: int | None = None
    op: Collective | None = None


@dataclass(slots=True)
class RankRecording:
    device: list[DeviceSpan] = field(default_factory=list)
    host: list[HostSpan] = field(default_factory=list)

    @property
    def window_us(self) -> float:
        return max(span.end for span in self.device) - min(span.start for span in self.device)


Recording = Mapping[int, RankRecording]
"""That of each rank."""


@dataclass(slots=True, eq=False)
class _Command:
    """One thing in a stream. meet: of work that has started."""

    op: Op
    rank: int
    stream: int
    ready: float
    correlation: int
    start: float = inf
    done: bool = False
    meet: "_Meeting" = field(default_factory=lambda: _Meeting(0, 0.0))


@dataclass(slots=True, eq=False)
class _Meeting:
    """A transfer of several ranks; a kernel is one of a single rank. left: microseconds of work left, alone."""

    missing: int
    left: float
    joined: list[_Command] = field(default_factory=list)


class _Device:
    """The streams and the hardware queues of one rank."""

    def __init__(self, machine: Machine):
        self.machine = machine
        self.numbers: dict[str, int] = {COMPUTE: 7}
        self.queues: dict[int, deque[_Command]] = defaultdict(deque)
        self.last: dict[int, _Command] = {}
        self.busy: dict[int, _Command] = {}
        self.free: dict[int, float] = defaultdict(float)
        self.passed: dict[str, bool] = {}

    def number(self, stream: str) -> int:
        return self.numbers.setdefault(stream, 16 + 4 * len(self.numbers))

    def append(self, command: _Command) -> None:
        place = list(self.numbers.values()).index(command.stream)
        self.queues[place % self.machine.queues].append(command)
        self.last[command.stream] = command

    def startable(self, command: _Command, now: float) -> float:
        """When the head of a queue can start as far as is known now; inf if that hangs on something else."""
        if command.stream in self.busy:
            return inf
        if isinstance(command.op, Await) and not self.passed.get(command.op.mark):
            return inf
        return max(command.ready, self.free[command.stream], now)


class _Run:
    def __init__(self, job: Job):
        self.job, self.now = job, 0.0
        self.devices = {rank: _Device(job.machine) for rank in job.programs}
        self.recordings = {rank: RankRecording() for rank in job.programs}
        self.meetings: dict[str, _Meeting] = {}
        self.running: list[_Command] = []
        self.correlations = count(1)
        self.turns: list[tuple[float, int]] = []
        self.hosts = {rank: self._host(rank, ops) for rank, ops in job.programs.items()}
        self.waiting: dict[int, _Command] = {}

    # ---- hosts ----

    def _host(self, rank: int, ops: tuple[Op, ...]) -> Iterator[float | _Command]:
        """Yields the time that passes, or the command that the host waits for."""
        machine, host, opened = self.job.machine, self.recordings[rank].host, list[tuple[str, str, float]]()
        for op in ops:
            began = self.now
            match op:
                case Begin(name, what):
                    opened.append((what, name, began))
                case End():
                    what, name, since = opened.pop()
                    host.append(HostSpan(what, name, since, began))
                case Python(us):
                    yield us
                case Record(mark, stream):
                    self.devices[rank].passed[mark] = False
                    yield from self._call(rank, op, stream, "cudaEventRecord", 1.0)
                case Await(_, stream):
                    yield from self._call(rank, op, stream, "cudaStreamWaitEvent", 1.0)
                case Kernel():
                    yield machine.call_us
                    yield from self._call(rank, op, op.stream, "cudaLaunchKernel", machine.launch_us)
                    host.append(HostSpan("operator", op.operator, began, self.now))
                case Graph(kernels):
                    yield machine.call_us
                    yield from self._call(rank, op, kernels[0].stream, "cudaGraphLaunch", 2 * machine.launch_us)
                case Collective():
                    yield from self._collective(rank, op)
                case Item(stream):
                    yield machine.call_us
                    copy = Kernel("Memcpy DtoH (Device -> Pageable)", 2.0, stream, 0, category="gpu_memcpy")
                    yield from self._call(rank, copy, stream, "cudaMemcpyAsync", machine.launch_us)
                    yield from self._host(rank, (Call("cudaStreamSynchronize", 2.0, True, stream),))
                    for name in ("aten::_local_scalar_dense", "aten::item"):
                        host.append(HostSpan("operator", name, began, self.now))

                case Call(name, us, waits, stream):
                    if waits:
                        yield self.devices[rank].last[self.devices[rank].number(stream)]
                    yield us
                    if name:
                        host.append(HostSpan("runtime", name, began, self.now, next(self.correlations)))

    def _collective(self, rank: int, op: Collective) -> Iterator[float | _Command]:
        machine, host, began = self.job.machine, self.recordings[rank].host, self.now
        device = self.devices[rank]
        device.passed[op.done] = False
        yield from self._call(rank, Await(op.after, op.stream), op.stream, "cudaStreamWaitEvent", 1.0)
        yield 2 * machine.call_us
        self.meetings.setdefault(op.key, _Meeting(len(op.ranks), op.us))
        yield from self._call(rank, op, op.stream, "cudaLaunchKernelExC", machine.launch_us)
        host.append(HostSpan("comms", "record_param_comms", began, self.now, None, op))
        yield from self._call(rank, Record(op.done, op.stream), op.stream, "cudaEventRecord", 1.0)
        if op.label:
            host.append(HostSpan("annotation", op.label, began, self.now))

    def _call(self, rank: int, op: Op, stream: str, name: str, us: float) -> Iterator[float | _Command]:
        """A call of the runtime that appends `op` to a stream."""
        device, began, correlation = self.devices[rank], self.now, next(self.correlations)
        yield us
        number, ready = device.number(stream), self.now + self.job.machine.latency_us
        for part in op.kernels if isinstance(op, Graph) else (op,):
            device.append(_Command(part, rank, number, ready, correlation))
        self.recordings[rank].host.append(HostSpan("runtime", name, began, self.now, correlation))

    def _advance_host(self, rank: int) -> None:
        step = next(self.hosts[rank], None)
        if isinstance(step, _Command):
            self.waiting[rank] = step
        elif step is not None:
            heapq.heappush(self.turns, (self.now + step, rank))

    # ---- devices ----

    def _start_all(self) -> float:
        """Start what can start. Returns when the next queue could go on by itself."""
        soonest = inf
        for rank, device in self.devices.items():
            again = True
            while again:
                again = False
                for queue in device.queues.values():
                    while queue:
                        time = device.startable(queue[0], self.now)
                        if time > self.now + _NO_TIME:
                            soonest = min(soonest, time)
                            break
                        self._start(rank, queue.popleft())
                        again = True
        return soonest

    def _start(self, rank: int, command: _Command) -> None:
        device, op = self.devices[rank], command.op
        if isinstance(op, Record):
            device.passed[op.mark] = True
        if not isinstance(op, Kernel | Collective):
            command.done = True
            return
        command.start = self.now
        device.busy[command.stream] = command
        self.running.append(command)
        command.meet = meeting = self.meetings[op.key] if isinstance(op, Collective) else _Meeting(1, op.us)
        meeting.joined.append(command)
        meeting.missing -= 1

    def _rates(self) -> dict[_Meeting, float]:
        machine, computing = self.job.machine, Counter(c.rank for c in self.running if isinstance(c.op, Kernel))
        transferring = {command.rank for command in self.running if isinstance(command.op, Collective)}
        rates: dict[_Meeting, float] = {}
        for command in self.running:
            meeting = command.meet
            if isinstance(command.op, Kernel):
                beside = 1 + machine.slower_beside_transfers * (command.rank in transferring)
                rates[meeting] = 1 / beside / computing[command.rank]
            elif not meeting.missing:
                slowed = any(computing[one.rank] for one in meeting.joined)
                rates[meeting] = 1 / (1 + machine.slower_beside_computation * slowed)
        return rates

    def _finish(self) -> None:
        for command in [c for c in self.running if not c.meet.missing and c.meet.left <= _NO_TIME]:
            self.running.remove(command)
            device, op = self.devices[command.rank], command.op
            command.done = True
            del device.busy[command.stream]
            device.free[command.stream] = self.now + self.job.machine.gap_us
            assert isinstance(op, Kernel | Collective)
            span = DeviceSpan(op, command.start, self.now, command.stream, command.correlation)
            self.recordings[command.rank].device.append(span)

    def run(self) -> Recording:
        for rank in self.hosts:
            self._advance_host(rank)
        while True:
            soonest = self._start_all()
            for rank, command in list(self.waiting.items()):
                if command.done:
                    del self.waiting[rank]
                    self._advance_host(rank)
            rates = self._rates()
            ends = (self.now + what.left / rate for what, rate in rates.items())
            upcoming = min(self.turns[0][0] if self.turns else inf, soonest, *ends, inf)
            if upcoming == inf:
                break
            for what, rate in rates.items():
                what.left -= rate * (upcoming - self.now)
            self.now = upcoming
            self._finish()
            while self.turns and self.turns[0][0] <= self.now:
                self._advance_host(heapq.heappop(self.turns)[1])
        assert not self.running and not self.waiting, "the programs do not fit together"
        assert not any(queue for device in self.devices.values() for queue in device.queues.values())
        return self.recordings


def run(job: Job) -> Recording:
    return _Run(job).run()
