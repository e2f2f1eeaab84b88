"""The values of a trace: events on devices, their launches, and what the host did around these.

The package `reading` fills them from files. Only the fields that the analysis needs are kept.
"""

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from ...overlap.labels import letter_of

Kind = Literal["compute", "comm", "copy"]

WAITS = re.compile(r"[Ss]ynchronize|Memcpy(?!.*Async)|^(?:ur|pi|ze)\w*(?:Finish|Wait)(?!WithBarrier)")
"""Names of calls in which the host waits for the device, of CUDA, HIP and SYCL."""
CLOCK = 1.0
"""Resolution of the clock, in microseconds."""
WAKE_UP = 500.0
"""Microseconds from the end of a transfer until a waiting thread of a CPU goes on, at most."""
PEER_COPY = "peer copy"
"""The category of a copy to another device. Its name may not tell."""


class TraceError(ValueError):
    """The file is not a usable trace. The message is one line that names the file."""


class Collective(NamedTuple):
    """The record of one collective or point-to-point transfer. Equal records are the same object."""

    name: str
    """The recorded name, such as "all_to_allv" or "allreduce"."""
    group: str = ""
    """Name of the process group."""
    description: str = ""
    """Description of the process group, such as "default_pg"."""
    ranks: tuple[int, ...] = ()
    """Global ranks of the group; () if unknown or elided."""
    size: int = 0
    """Number of ranks in the group; 0 if unknown."""
    in_elems: int | None = None
    out_elems: int | None = None
    """Number of elements that this rank gives and gets."""
    dtype: str = ""
    sequence: int | None = None
    """Number of the collective in its group."""
    peer: int | None = None
    """The other rank of a point-to-point transfer."""

    @property
    def group_name(self) -> str:
        """The description of the group; without one, its name in PyTorch, which can be a number."""
        return self.group if self.description in ("", "undefined") else self.description


class HostEvent(NamedTuple):
    """An annotation, operator, transfer or launch on a thread of the host. Times in microseconds."""

    name: str
    start: float
    end: float
    thread: tuple[str, str]


class DeviceEvent(NamedTuple):
    """A kernel, copy or fill on a device; on a CPU, a piece of an operator or a transfer. Times in microseconds."""

    name: str
    category: str
    """The category in the file, in lower case, or PEER_COPY; on a CPU, "operator" or "transfer"."""
    start: float
    end: float
    device: str
    stream: str
    correlation: int | None
    blocks: int
    """Thread blocks of the launch grid; 0 if unknown."""
    bytes: int = 0
    """Bytes that a copy or fill moves; 0 if unknown."""
    collective: Collective | None = None
    """The collective that a communication kernel belongs to, if it is recorded."""
    kind: Kind = "compute"
    """Like `owner` and `is_named`, filled by `as_device` (host.py)."""
    owner: HostEvent | None = None
    """The annotation or module that launched it; None if unknown."""
    is_named: bool = False
    """Whether the owner is a part of the program, and not broad (phases.py)."""

    @property
    def phase(self) -> str:
        """The name of the owner; without one, the name of the transfer, or ""."""
        return self.owner.name if self.owner else self._transfer[0]

    @property
    def part(self) -> str:
        """The name of the transfer and of the part of the program; "" if both are unknown."""
        place = self.owner.name if self.owner and self.is_named else ""
        if letter_of(place):
            return place
        transfer, group = self._transfer
        if not transfer:
            return place
        place = group or place
        return f"{transfer} in {place}" if place else transfer * (transfer != self.name)

    @property
    def place(self) -> str:
        """The most telling name: of its transfer, of its owner unless that is broad, or its own."""
        return self.part or self.name

    @property
    def _transfer(self) -> tuple[str, str]:
        """The recorded name of a transfer and its group; "" for other work, and if none was recorded."""
        if self.kind != "comm":
            return "", ""
        if self.collective is not None:
            return self.collective.name, self.collective.group_name
        return (self.name, "") if self.category == "transfer" else ("", "")


@dataclass
class Trace:
    """The contents of one file."""

    device_events: list[DeviceEvent] = field(default_factory=list)
    launches: dict[int, HostEvent] = field(default_factory=dict)
    """Launches of device events, by correlation id, and other calls, those without an id by negative numbers."""
    annotations: list[HostEvent] = field(default_factory=list)
    operators: list[HostEvent] = field(default_factory=list)
    """Nested operators of the host, where no device events are recorded."""
    transfers: list[HostEvent] = field(default_factory=list)
    """Transfers as recorded by a backend on the host."""
    waits: list[HostEvent] = field(default_factory=list)
    """Waits, where a CPU is the device (host.py)."""
    num_events: int = 0
    truncated: bool = False
    """Whether events were not read, because the file is incomplete or too long."""
    rank: int | None = None
    label: str = ""
    """Which rank of a file with several ranks it is, such as "[TP01]"; "" for the only one."""
    host: str = ""
    base_us: float = 0.0
    """The origin of the file's times, on the clock of the host."""
    num_sms: int = 0
    """SMs of the first GPU in the file; 0 if unknown."""
    gpu: str = ""
    """Name of the first GPU in the file; "" if unknown."""
    steps: list[HostEvent] = field(default_factory=list)
    """Steps of the profiler, such as "ProfilerStep#5"."""
    modules: list[HostEvent] = field(default_factory=list)
    """Calls of modules, such as "Linear_3", where Python was recorded."""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Global ranks of each process group, by its name."""
    world_size: int | None = None
    skipped: int = 0
    """Number of damaged events that were left out."""
    repaired: int = 0
    """Number of damaged events that could be read."""
    notes: list[str] = field(default_factory=list)
    """Other damage of the file, such as "its gzip data is damaged"."""
    queues: int | None = None
    """CUDA_DEVICE_MAX_CONNECTIONS, if it is recorded."""

    @property
    def start_us(self) -> float:
        """Start of the first device event."""
        return min(event.start for event in self.device_events)

    def launch_of(self, event: DeviceEvent) -> HostEvent | None:
        """The launch of `event`, if it is recorded."""
        return None if event.correlation is None else self.launches.get(event.correlation)

    def annotation_of(self, event: DeviceEvent) -> HostEvent | None:
        """The innermost annotation around the launch of `event`, if both are in the trace."""
        return None if event.correlation is None else self._annotations_of_launches.get(event.correlation)

    @cached_property
    def _annotations_of_launches(self) -> dict[int, HostEvent]:
        return self.innermost_around(self.annotations)

    def launches_of_work(self) -> Iterator[tuple[int, HostEvent]]:
        """Yield the launches of the device events with their correlation ids: often a small part of all launches."""
        for correlation in {event.correlation for event in self.device_events}:
            if correlation is not None and (launch := self.launches.get(correlation)) is not None:
                yield correlation, launch

    def innermost_around(self, events: Sequence[HostEvent]) -> dict[int, HostEvent]:
        """Return the innermost of `events` around each launch of a device event, by correlation id.

        An event of the launching thread comes first, then one of any thread: autograd's thread has no annotations, and
        the thread that called it waits inside one.
        """
        found = self.innermost_on_thread(events)
        others = [(launch.start, number) for number, launch in self.launches_of_work() if number not in found]
        return found | innermost(events, others)

    def innermost_on_thread(self, events: Iterable[HostEvent]) -> dict[int, HostEvent]:
        """Return the innermost of `events` around each launch of a device event on the same thread."""
        threads: dict[tuple[str, str], list[HostEvent]] = defaultdict(list)
        for event in events:
            threads[event.thread].append(event)
        if not threads:
            return {}
        launches: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        for correlation, launch in self.launches_of_work():
            launches[launch.thread].append((launch.start, correlation))
        found: dict[int, HostEvent] = {}
        for thread, inside in threads.items():
            found |= innermost(inside, launches[thread])
        return found


def innermost(events: Iterable[HostEvent], launches: Iterable[tuple[float, int]]) -> dict[int, HostEvent]:
    """Return, of the events around each launch, the one that started last. A launch is a time and a correlation id."""
    in_order = sorted(launches)
    around = running_at(events, (time for time, _ in in_order))
    return {number: inside[-1] for (_, number), inside in zip(in_order, around, strict=True) if inside}


def running_at(events: Iterable[HostEvent], times: Iterable[float]) -> Iterator[list[HostEvent]]:
    """Yield the events around each of the times, which are sorted. The last one started last, and is the shortest."""
    later = deque(sorted(events, key=lambda event: (event.start, -event.end)))
    around: list[HostEvent] = []
    for time in times:
        while later and later[0].start <= time:
            around.append(later.popleft())
        around = [event for event in around if event.end > time]
        yield around
