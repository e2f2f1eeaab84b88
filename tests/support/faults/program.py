"""What the host of a rank does, in order: a program is a list of these values.

Work for the device goes to streams by name. Events order streams as in CUDA: `Record` marks a place in one stream, and
`Await` holds another stream until the first has passed the mark. Durations are what the work takes alone.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    us: float
    stream: str = COMPUTE
    grid: int = 528
    operator: str = "aten::mm"
    category: str = "kernel"
    segment: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """A transfer. Ranks whose calls have the same `key` take part; it moves data once all of them have joined."""

    key: str
    kind: str
    """Such as "all_to_allv" or "send"."""
    group: str
    ranks: tuple[int, ...]
    us: float
    elements: int
    stream: str
    after: str
    """The mark that its stream awaits first."""
    label: str = ""
    """The annotation around the call; "" for none."""
    peers: tuple[int, int] | None = None
    """Source and destination of a send or a receive."""
    sequence: int | None = None
    """Its number in its group, if it is recorded."""

    @property
    def done(self) -> str:
        return f"done {self.key}"


@dataclass(frozen=True, slots=True)
class Graph:
    """Kernels that one call launches together."""

    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Record:
    mark: str
    stream: str = COMPUTE


@dataclass(frozen=True, slots=True)
class Await:
    mark: str
    stream: str = COMPUTE


@dataclass(frozen=True, slots=True)
class Item:
    """Copy a number to the host and wait for it."""

    stream: str = COMPUTE


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the runtime that launches nothing. waits: first for the last work of a stream. Without a name, the host
    looks into its own memory, and nothing is recorded."""

    name: str
    us: float
    waits: bool = False
    stream: str = COMPUTE


def poll(stream: str) -> Call:
    return Call("", 10.0, True, stream)


@dataclass(frozen=True, slots=True)
class Python:
    """Time of the host between calls."""

    us: float


@dataclass(frozen=True, slots=True)
class Begin:
    """Start of a range. what: "annotation", "step" or "module"."""

    name: str
    what: str = "annotation"


@dataclass(frozen=True, slots=True)
class End:
    pass


Op = Kernel | Collective | Graph | Record | Await | Item | Call | Python | Begin | End


@dataclass(frozen=True, slots=True)
class Machine:
    """What a call and a transfer cost."""

    call_us: float = 8.0
    """The framework's time before a launch."""
    launch_us: float = 4.0
    latency_us: float = 3.0
    """From the end of the launch to the earliest start."""
    queues: int = 32
    """Hardware queues. Streams share them in turn. A queue starts its work in the order of the launches."""
    slower_beside_transfers: float = 0.03
    slower_beside_computation: float = 0.03
    gap_us: float = 1.0
    """Between two kernels of a stream."""


@dataclass(frozen=True, slots=True)
class Job:
    """The programs of all ranks, and their machine."""

    programs: Mapping[int, tuple[Op, ...]]
    machine: Machine = Machine()
    seed: int = 0

    def on(self, **changes: object) -> "Job":
        """The same job on another machine."""
        return replace(self, machine=replace(self.machine, **changes))  # type: ignore[arg-type]


Shares = Sequence[tuple[str, str, float]]  # kernel, operator, share of the segment


class Writer:
    """Writes the program of one rank. Durations vary by `jitter`, equally with and without a fault."""

    def __init__(self, rank: int, seed: int, jitter: float, foreign: bool = False):
        self.rank, self.seed, self.jitter, self.foreign = rank, seed, jitter, foreign
        self.ops: list[Op] = []

    def varied(self, us: float, *key: object) -> float:
        return us * (1 + random.Random(f"{self.seed} {key}").uniform(-self.jitter, self.jitter))

    @contextmanager
    def range(self, name: str, what: str = "annotation") -> Iterator[None]:
        self.ops.append(Begin(name, what))
        yield
        self.ops.append(End())

    def steps(self, number: int) -> Iterator[int]:
        for step in range(number):
            with self.range(f"ProfilerStep#{step}", "step"):
                yield step

    def segment(self, label: str, module: str, us: float, shares: Shares, grid: int, python_us: float = 60.0) -> None:
        """A named part of the computation. Its end is marked with the label and `place` of the call."""
        with self.range(module if self.foreign else label, "module" if self.foreign else "annotation"):
            self.ops.append(Python(python_us))
            for name, operator, share in shares:
                duration = self.varied(us * share, self.rank, len(self.ops))
                self.ops.append(Kernel(name, duration, COMPUTE, grid, operator, segment=label))

    def transfer(self, label: str, kind: str, group: str, ranks: tuple[int, ...], us: float, stream: str, *,
                 key: str, after: str, elements: int = 0, peers: tuple[int, int] | None = None) -> None:  # fmt: skip
        """us is for the ranks together: its variation does not depend on the rank."""
        key = f"{key} of {ranks}"
        self.ops.append(Collective(
            key, kind, group, ranks, self.varied(us, key), elements or int(us * 40_000), stream, after,
            "" if self.foreign else label, peers,
        ))  # fmt: skip

    def sent(self, label: str, kind: str, group: str, us: float, key: str, stream: str) -> None:
        """A transfer of what has been computed so far."""
        self.ops.append(Record(key))
        self.transfer(label, kind, group, (0, 1), us, stream, key=key, after=key)
