"""How much communication was hidden? The arithmetic of a trace.

Device work is communication if its name says so, and computation otherwise, copies and fills included; a trace
without a device is that of a CPU (host.py). All times are lengths of unions of intervals: a moment in which two kernels
of a kind run counts once. Communication is hidden where anything computes at the same time, else exposed.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import numpy as np

from .gaps import Wait, find_waits
from .host import host_as_device, phase_of_wait
from .intervals import EMPTY, Intervals, as_intervals, difference, intersection, total, union
from .trace import DeviceEvent, Trace

COMMUNICATION = re.compile(
    r"nccl|nvshmem|deep_?ep|::ep::|multimem|symm_?mem|paced_copy"
    r"|all_?to_?all|all_?gather|all_?reduce|reduce_?scatter|send_?recv|_shot_",
    re.IGNORECASE,
)
"""Kernels of NCCL, NVSHMEM, DeepEP (also as part of another package), torch's symmetric memory, and our own. On a CPU,
annotations besides the transfers of backends."""


@dataclass(frozen=True, slots=True)
class Phase:
    """The device work that was launched inside annotations of one name: sums of kernels' times, not unions."""

    name: str
    times: int
    """How many annotations there are, those of waits not counted."""
    compute_us: float
    comm_us: float
    copy_us: float
    exposed_comm_us: float
    """How long its communication was exposed; this one is a union."""


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
    """Of one device. Microseconds."""

    device: str
    window_us: float
    """From the first start of any work to the last end."""
    busy_us: float
    compute_us: float
    comm_us: float
    copy_us: float
    """The part of the computation's time in which something was copied or filled."""
    overlapped_us: float
    """Communication while something computes."""
    exposed_comm_us: float
    """Communication while nothing computes."""
    idle_us: float
    num_comm: int
    comm_blocks: int
    """The most thread blocks of a communication kernel: as many SMs can it occupy, if the GPU has more."""
    num_sms: int
    """Of the GPU; 0 where the trace does not say."""
    phases: tuple[Phase, ...]
    waits: tuple[Wait, ...]
    """Every moment in which nothing computed: together `exposed_comm_us` and `idle_us`."""
    streams: dict[str, float]
    """Busy time by stream; on a CPU by thread."""
    kernels: tuple[Kernel, ...]
    """The longest first."""

    @property
    def name(self) -> str:
        return "cpu" if self.device == "cpu" else f"device {self.device}"

    @property
    def hidden_fraction(self) -> float | None:
        """The hidden share of the communication; None where there is none."""
        return self.overlapped_us / self.comm_us if self.comm_us else None

    def as_object(self) -> dict[str, Any]:
        """For `json`."""
        return {**asdict(self), "hidden_fraction": self.hidden_fraction}


def analyze(trace: Trace, comm_pattern: str | re.Pattern[str] = COMMUNICATION) -> tuple[Analysis, ...]:
    """An analysis for each device on which `trace` has work, in order of their names."""
    pattern = re.compile(comm_pattern) if isinstance(comm_pattern, str) else comm_pattern
    trace = host_as_device(trace, pattern)
    by_device = _grouped(trace.device_events, attrgetter("device"))
    return tuple(_analyze(device, by_device[device], trace, pattern) for device in sorted(by_device))


def _analyze(device: str, works: Sequence[DeviceEvent], trace: Trace, pattern: re.Pattern[str]) -> Analysis:
    by_kind = {"compute": [], "comm": [], "copy": []} | _grouped(works, lambda work: kind_of(work, pattern))
    compute = union(intervals_of([*by_kind["compute"], *by_kind["copy"]]))
    comm, copies = (union(intervals_of(by_kind[kind])) for kind in ("comm", "copy"))
    every = union(intervals_of(works))
    exposed = difference(comm, compute)
    extent = np.array([[every[0, 0], every[-1, 1]]]) if len(every) else EMPTY
    window = total(extent)
    streams = _grouped(works, attrgetter("stream"))
    return Analysis(
        device=device,
        window_us=window,
        busy_us=total(every),
        compute_us=total(compute),
        comm_us=total(comm),
        copy_us=total(copies),
        overlapped_us=total(intersection(comm, compute)),
        exposed_comm_us=total(exposed),
        idle_us=window - total(every),
        num_comm=len(by_kind["comm"]),
        comm_blocks=max((work.blocks for work in by_kind["comm"]), default=0),
        num_sms=trace.num_sms,
        phases=_phases(by_kind, trace, exposed),
        waits=find_waits(trace, difference(extent, compute), [*by_kind["compute"], *by_kind["copy"]], by_kind["comm"]),
        streams={stream: total(union(intervals_of(streams[stream]))) for stream in sorted(streams)},
        kernels=_kernels(by_kind),
    )


def kind_of(work: DeviceEvent, pattern: re.Pattern[str] = COMMUNICATION) -> str:
    """compute, comm or copy. A kernel on a communication stream is not communication because of that."""
    return _kind(work.name, work.category, pattern)


@lru_cache(maxsize=1 << 16)
def _kind(name: str, category: str, pattern: re.Pattern[str]) -> str:
    if category == "transfer" or (category != "operator" and pattern.search(name)):
        return "comm"
    return "compute" if category in ("kernel", "operator") else "copy"


def intervals_of(works: Iterable[DeviceEvent]) -> Intervals:
    """When each of them ran."""
    return as_intervals((work.start, work.end) for work in works)


def _phases(by_kind: dict[str, list[DeviceEvent]], trace: Trace, exposed: Intervals) -> tuple[Phase, ...]:
    launched: dict[str, dict[str, list[DeviceEvent]]] = defaultdict(lambda: {kind: [] for kind in by_kind})
    for kind, works in by_kind.items():
        for work in works:
            if (mark := trace.annotation_of(work)) is not None:
                launched[mark.name][kind].append(work)
    phases = []
    times = Counter(mark.name for mark in trace.annotations)
    waits = Counter(phase_of_wait(mark) for mark in trace.waits)
    for name in times:
        if name in launched:
            compute, comm, copies = launched[name].values()
            exposed_here = total(intersection(union(intervals_of(comm)), exposed))
            phases.append(
                Phase(name, max(times[name] - waits[name], 1), _sum(compute), _sum(comm), _sum(copies), exposed_here)
            )
    return tuple(phases)


def _grouped(works: Iterable[DeviceEvent], key: Callable[[DeviceEvent], str]) -> dict[str, list[DeviceEvent]]:
    groups: dict[str, list[DeviceEvent]] = defaultdict(list)
    for work in works:
        groups[key(work)].append(work)
    return groups


def _sum(works: Iterable[DeviceEvent]) -> float:
    return sum(work.end - work.start for work in works)


def _kernels(by_kind: dict[str, list[DeviceEvent]]) -> tuple[Kernel, ...]:
    kernels = []
    for kind, works in by_kind.items():
        kernels += [
            Kernel(name, kind, len(same), _sum(same), max(w.blocks for w in same))
            for name, same in _grouped(works, attrgetter("name")).items()
        ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.total_us))
