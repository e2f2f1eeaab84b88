"""Compute from a trace how much communication was hidden behind computation.

A device event is communication if its name matches a pattern. All other events are computation, including copies and
fills. In a trace without device events, the CPU is the device (see host.py). Times are lengths of unions of intervals,
so two kernels that run at the same moment count once. Communication is hidden while any computation runs on the same
device, and exposed otherwise.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from ..messages import printable
from ..overlap.labels import without_wait
from .delays import Delay, start_delays
from .gaps import Wait, find_waits
from .host import host_as_device
from .intervals import EMPTY, Intervals, difference, intersection, intervals_of, total, union
from .trace import DeviceEvent, Trace

COMMUNICATION = re.compile(
    r"nccl|nvshmem|deep_?ep|::ep::|multimem|symm_?mem"
    r"|(?:push|receive_rows|receive_sums|release)_kernel"
    r"|all_?to_?all|all_?gather|all_?reduce|reduce_?scatter|send_?recv|_shot_",
    re.IGNORECASE,
)
"""Kernel names of NCCL, NVSHMEM, DeepEP (also inside other packages), torch's symmetric memory and this project. On a
CPU, annotations with such names are communication too, in addition to the transfers of backends."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The device events that were launched inside annotations of one name. Times are sums over events, not unions."""

    name: str
    times: int
    """Number of annotations, not counting those of waits."""
    compute_us: float
    comm_us: float
    copy_us: float
    exposed_comm_us: float
    """Exposed time of the communication. Unlike the other times, the length of a union."""


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    kind: str
    """compute, comm or copy."""
    times: int
    total_us: float
    most_blocks: int


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result for one device. Times are in microseconds."""

    device: str
    window_us: float
    """From the start of the first event to the end of the last one."""
    busy_us: float
    compute_us: float
    comm_us: float
    copy_us: float
    """Time of copies and fills, a part of `compute_us`."""
    overlapped_us: float
    """Hidden communication."""
    exposed_comm_us: float
    """Communication that is not hidden."""
    idle_us: float
    """Neither computation nor communication."""
    num_comm: int
    comm_blocks: int
    """Thread blocks of the largest communication kernel: an upper limit on the SMs that it occupies."""
    num_sms: int
    """SMs of the GPU; 0 if unknown."""
    phases: tuple[Phase, ...]
    waits: tuple[Wait, ...]
    """All time without computation: `exposed_comm_us` + `idle_us` in total."""
    delays: tuple[Delay, ...]
    """How late transfers start after they could (delays.py)."""
    streams: dict[str, float]
    """Busy time of each stream; on a CPU, of each thread."""
    kernels: tuple[Kernel, ...]
    """Sorted by total time, longest first."""

    @property
    def name(self) -> str:
        return "cpu" if self.device == "cpu" else f"device {printable(self.device, 60)}"

    @property
    def hidden_fraction(self) -> float | None:
        """Hidden share of the communication; None without communication."""
        return self.overlapped_us / self.comm_us if self.comm_us else None

    def as_object(self) -> dict[str, Any]:
        return {**asdict(self), "hidden_fraction": self.hidden_fraction}


def analyze(trace: Trace, comm_pattern: str | re.Pattern[str] = COMMUNICATION) -> tuple[Analysis, ...]:
    """Return an analysis of each device with events, sorted by name. Names with `comm_pattern` are communication."""
    pattern = re.compile(comm_pattern) if isinstance(comm_pattern, str) else comm_pattern
    trace = host_as_device(trace, pattern)
    by_device = _group(trace.device_events, attrgetter("device"))
    return tuple(_analyze(device, by_device[device], trace, pattern) for device in sorted(by_device))


def _analyze(device: str, events: Sequence[DeviceEvent], trace: Trace, pattern: re.Pattern[str]) -> Analysis:
    by_kind = {"compute": [], "comm": [], "copy": []} | _group(events, lambda event: kind_of(event, pattern))
    computing = [*by_kind["compute"], *by_kind["copy"]]
    compute = union(intervals_of(computing))
    comm, copies = (union(intervals_of(by_kind[kind])) for kind in ("comm", "copy"))
    busy = union(intervals_of(events))
    exposed = difference(comm, compute)
    extent = np.array([[busy[0, 0], busy[-1, 1]]]) if len(busy) else EMPTY
    window = total(extent)
    streams = _group(events, attrgetter("stream"))
    return Analysis(
        device=device, window_us=window, busy_us=total(busy), idle_us=window - total(busy),
        compute_us=total(compute), comm_us=total(comm), copy_us=total(copies),
        overlapped_us=total(intersection(comm, compute)), exposed_comm_us=total(exposed),
        num_comm=len(by_kind["comm"]), num_sms=trace.num_sms,
        comm_blocks=max((event.blocks for event in by_kind["comm"]), default=0),
        phases=_phases(by_kind, trace, exposed),
        waits=find_waits(trace, difference(extent, compute), computing, by_kind["comm"]),
        delays=start_delays(trace, computing, by_kind["comm"]),
        streams={stream: total(union(intervals_of(streams[stream]))) for stream in sorted(streams)},
        kernels=_kernels(by_kind),
    )  # fmt: skip


def kind_of(event: DeviceEvent, pattern: re.Pattern[str] = COMMUNICATION) -> str:
    """Return compute, comm or copy. Only the name and the category count, not the stream."""
    return _kind(event.name, event.category, pattern)


@lru_cache(maxsize=1 << 16)
def _kind(name: str, category: str, pattern: re.Pattern[str]) -> str:
    if category == "transfer" or (category != "operator" and pattern.search(name)):
        return "comm"
    return "compute" if category in ("kernel", "operator") else "copy"


def _phases(by_kind: dict[str, list[DeviceEvent]], trace: Trace, exposed: Intervals) -> tuple[Phase, ...]:
    launched: dict[str, dict[str, list[DeviceEvent]]] = defaultdict(lambda: {kind: [] for kind in by_kind})
    for kind, events in by_kind.items():
        for event in events:
            if (annotation := trace.annotation_of(event)) is not None:
                launched[annotation.name][kind].append(event)
    phases = []
    times = Counter(annotation.name for annotation in trace.annotations)
    times_waited = Counter(without_wait(wait.name) for wait in trace.waits)
    for name in (name for name in times if name in launched):
        comm_exposed = total(intersection(union(intervals_of(launched[name]["comm"])), exposed))
        compute, comm, copies = (_sum(events) for events in launched[name].values())
        phases.append(Phase(name, max(times[name] - times_waited[name], 1), compute, comm, copies, comm_exposed))
    return tuple(phases)


def _group(events: Iterable[DeviceEvent], key: Callable[[DeviceEvent], str]) -> dict[str, list[DeviceEvent]]:
    groups: dict[str, list[DeviceEvent]] = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return groups


def _sum(events: Iterable[DeviceEvent]) -> float:
    return sum(event.end - event.start for event in events)


def _kernels(by_kind: dict[str, list[DeviceEvent]]) -> tuple[Kernel, ...]:
    kernels = [
        Kernel(name, kind, len(same), _sum(same), max(event.blocks for event in same))
        for kind, events in by_kind.items()
        for name, same in _group(events, attrgetter("name")).items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.total_us))
