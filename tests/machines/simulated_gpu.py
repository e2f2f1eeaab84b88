"""A simulated GPU on CPU tensors, which finds memory that is read, written or reused too early.

A GPU runs the work of one stream in order. Work on two streams runs in any order, unless an event orders it. The
simulation runs every operator at once and keeps vector clocks: for each stream, how far every other stream has come at
least when the stream's next operator runs (as in torch.cuda._sanitizer). So one run covers all orders in which a GPU
could run the work that was queued.

    race     an access to a storage that is not ordered after the last write, or a write that is not ordered after all
             reads since; a host read of pinned memory without a wait for the copy
    reuse    as in CUDA's caching allocator, a storage belongs to the stream on which it was allocated, and may be used
             for a new storage of this stream as soon as its last reference is dropped. The worst case is assumed: every
             new storage reuses every freed one. So its first write must be ordered after all uses of these

Reading a number on the host (`item`) orders nothing here: operators for CPU tensors do so where those for GPUs do not.
"""

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten
ALLOCATIONS = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_thread = threading.local()


class RaceError(AssertionError):
    """Memory is used too early."""


class SimulatedStream:
    def __init__(self, gpu: "SimulatedGpu", name: str):
        self.gpu, self.device, self.name = gpu, gpu.device, name
        self.clock: dict[SimulatedStream, int] = {}

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event(self.gpu)
        event.clock = self.clock | {}
        return event

    def wait_event(self, event: "Event") -> None:
        join(self.clock, event.clock)


class Event:
    def __init__(self, gpu: "SimulatedGpu"):
        self.gpu, self.device = gpu, gpu.device
        self.clock: dict[SimulatedStream, int] = {}

    def synchronize(self) -> None:
        join(self.gpu.host, self.clock)

    def elapsed_time(self, _end: "Event") -> float:
        return 0.0


def join(clock: dict[SimulatedStream, int], other: dict[SimulatedStream, int]) -> None:
    for stream, time in other.items():
        clock[stream] = max(time, clock.get(stream, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """The operator that `stream` runs at `time`, in the segment `label`. is_view: it uses no memory.

    clock: of the stream when it runs.
    """

    stream: SimulatedStream
    time: int
    operator: str
    label: str
    is_view: bool
    clock: dict[SimulatedStream, int]

    def is_before(self, clock: dict[SimulatedStream, int]) -> bool:
        return clock.get(self.stream, 0) >= self.time

    def __str__(self) -> str:
        return f"{self.operator} in {self.label} on {self.stream.name}"


@dataclass(slots=True)
class Memory:
    """The uses of one storage. freed: those of the storages whose memory it reuses. The last one per stream counts."""

    ref: StorageWeakRef
    owner: SimulatedStream | None  # None: pinned memory of the host
    write: Access | None = None
    reads: dict[SimulatedStream, Access] = field(default_factory=dict)
    freed: dict[SimulatedStream, Access] = field(default_factory=dict)

    def uses(self) -> Iterator[Access]:
        yield from self.freed.values()
        yield from [self.write] if self.write else []
        yield from self.reads.values()


class SimulatedGpu(TorchDispatchMode):
    """Inside this context, all tensors of this thread are on this GPU. It has the names of `torch.cuda` for streams.

    log: every operator so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.host: dict[SimulatedStream, int] = {}
        self.num_streams = 0
        self.streams = [self.Stream(name="compute")]  # the innermost `stream` context is last
        self.memory: dict[int, Memory] = {}
        self.freed: dict[SimulatedStream, dict[SimulatedStream, Access]] = defaultdict(dict)
        self.inside: list[str] = []
        self.log: list[Access] = []
        self._host_reads = _HostReads(self)
        self.engine: Any = None

    def __enter__(self) -> "SimulatedGpu":
        _thread.gpu = self
        self._host_reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._host_reads.__exit__(*error)
        del _thread.gpu

    # ---- torch.cuda ----

    def Stream(self, device: Any = None, priority: int = 0, name: str = "") -> SimulatedStream:  # noqa: N802 - as in torch.cuda
        self.num_streams += 1
        return SimulatedStream(self, name or f"side {self.num_streams - 1}")

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802 - as in torch.cuda
        return Event(self)

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return self.streams[-1]

    def is_current_stream_capturing(self) -> bool:
        return False

    @contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.pop()

    # ---- operators ----

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        written = [
            given
            for i, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for given in tensors(args[i] if i < len(args) else kwargs.get(argument.name))
        ]
        inputs = tensors((args, kwargs))
        known = {t.untyped_storage()._cdata for t in inputs}
        new = [t for t in tensors(result) if t.untyped_storage()._cdata not in known]
        for t in new:
            self._allocate(t, pinned)
        if func.overloadpacket not in ALLOCATIONS and (new or written or not tensors(result)):
            ids = {id(t) for t in written}
            self.access(func.overloadpacket.__name__, [t for t in inputs if id(t) not in ids], [*written, *new])
        else:
            self._log(func.overloadpacket.__name__, is_view=not new)
        return result

    def access(self, operator: str, reads: Iterable[Tensor] = (), writes: Iterable[Tensor] = ()) -> None:
        """SimulatedStream an operator on the current stream. Raises RaceError for memory that it may not use yet."""
        access = self._log(operator)
        clock = access.stream.clock
        for tensor in reads:
            memory = self._memory_of(tensor)
            if memory.write is not None and not memory.write.is_before(clock):
                raise RaceError(f"{access} reads what {memory.write} writes{_missing(access, memory.write)}")
            memory.reads[access.stream] = access
        for tensor in writes:
            memory = self._memory_of(tensor)
            for other in memory.uses():
                if other.is_before(clock):
                    continue
                owner = memory.owner.name if memory.owner else "the host"
                reused = f" reuses memory of {owner} that was freed, but" if other in memory.freed.values() else ""
                what = "is used by" if reused else "changes what is used by"
                raise RaceError(f"{access}{reused} {what} {other}{_missing(access, other)}")
            memory.write, memory.reads, memory.freed = access, {}, {}

    def host_read(self, tensor: Tensor) -> None:
        memory = self._memory_of(tensor)
        if memory.owner is None and memory.write is not None and not memory.write.is_before(self.host):
            raise RaceError(f"the host reads what {memory.write} writes, but has not waited for it")

    def _log(self, operator: str, is_view: bool = False) -> Access:
        stream = self.current_stream()
        join(stream.clock, self.host)  # what the host has waited for is over
        stream.clock[stream] = stream.clock.get(stream, 0) + 1
        label = self.inside[-1] if self.inside else "no segment"
        access = Access(stream, stream.clock[stream], operator, label, is_view, dict(stream.clock))
        self.log.append(access)
        return access

    # ---- memory ----

    def _memory_of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:  # it was there before the simulation
            self.memory[storage._cdata] = Memory(StorageWeakRef(storage), self.streams[0])
        return self.memory[storage._cdata]

    def _allocate(self, tensor: Tensor, pinned: bool) -> None:
        self._collect_freed()
        storage = tensor.untyped_storage()
        owner = None if pinned else self.current_stream()
        memory = self.memory[storage._cdata] = Memory(StorageWeakRef(storage), owner)
        if owner is not None and storage.nbytes():
            memory.freed = dict(self.freed[owner])

    def _collect_freed(self) -> None:
        for key, memory in [*self.memory.items()]:
            if torch.UntypedStorage._expired(memory.ref.cdata):
                del self.memory[key]
                if memory.owner is not None:
                    freed = self.freed[memory.owner]
                    for use in memory.uses():
                        if use.stream not in freed or freed[use.stream].time < use.time:
                            freed[use.stream] = use


class _HostReads(TorchFunctionMode):
    """Reports reads of the host that torch does not dispatch."""

    def __init__(self, gpu: SimulatedGpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            self.gpu.host_read(args[0])
        return func(*args, **(kwargs or {}))


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _missing(access: Access, other: Access) -> str:
    return f", but no event makes {access.stream.name} wait for {other.stream.name}"


def current_gpu(*_: Any) -> SimulatedGpu | None:
    return getattr(_thread, "gpu", None)


@contextmanager
def annotation(text: str) -> Iterator[None]:
    """Takes the place of the annotation for profilers."""
    gpu = current_gpu()
    if gpu is None:
        yield
        return
    gpu.inside.append(text)
    try:
        yield
    finally:
        gpu.inside.pop()
