"""Compute from a trace how much communication was hidden behind computation.

Names tell which device events are communication and which are copies (communication.py). In a trace without device
events, the CPU is the device (see host.py). Times are lengths of unions of intervals, so two kernels that run at the
same moment count once. Communication is hidden while a kernel computes on the same device, and exposed while neither a
kernel nor a copy runs. Copies compute nothing, but they are work that the device had to do: time beside them is neither
hidden nor exposed.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

import numpy as np

from ...messages import printable
from ...overlap.labels import without_wait
from .collectives import CollectiveRow
from .communication import NAMES, Names
from .doctor.verdict import Verdict
from .gaps import Wait, find_waits
from .host import host_as_device
from .intervals import EMPTY, Intervals, difference, intersection, intervals_of, total, union
from .phases import Phases
from .trace import DeviceEvent, Trace
from .windows import StepTimes


@dataclass(frozen=True, slots=True)
class Phase:
    """The device events that one part of the program launched. Times are sums over events, not unions."""

    name: str
    times: int
    """Number of annotations or calls of modules, not counting annotations of waits. Of transfers: their number."""
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
    most_blocks: int | None
    """Thread blocks of its largest launch. None: not recorded."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """The result for one device. Times are in microseconds."""

    device: str
    window_us: float
    """From the start of the first event to the end of the last one."""
    busy_us: float
    compute_us: float
    """Kernels and copies; on a CPU, operators."""
    kernel_compute_us: float
    """Kernels that compute: `compute_us` without the time in which only copies or fills run."""
    comm_us: float
    copy_us: float
    """Copies and fills."""
    overlapped_us: float
    """Communication beside kernels or copies."""
    hidden_kernels_us: float
    """Communication beside kernels, which is what counts as hidden."""
    exposed_comm_us: float
    """Communication beside neither kernels nor copies."""
    idle_us: float
    """Nothing runs."""
    num_comm: int
    comm_blocks: int | None
    """Thread blocks of the largest communication kernel: an upper limit on the SMs that it uses. None: not recorded."""
    num_sms: int | None
    """SMs of the GPU. None: not recorded."""
    phases: tuple[Phase, ...]
    waits: tuple[Wait, ...]
    """All time in which no kernel computes: `window_us` - `kernel_compute_us` in total."""
    streams: dict[str, float]
    """Busy time of each stream; on a CPU, of each thread."""
    kernels: tuple[Kernel, ...]
    """Sorted by total time, longest first."""
    verdicts: tuple[Verdict, ...] = ()
    """Causes of lost time, filled by `analyze_files`."""
    collectives: tuple[CollectiveRow, ...] = ()
    """Sorted by total time, longest first. Filled by `analyze_files`, which compares ranks."""
    by_step: tuple[StepTimes, ...] = ()
    """The times of each step, filled by `analyze_files`."""

    @property
    def name(self) -> str:
        return "cpu" if self.device == "cpu" else f"device {printable(self.device, 60)}"

    @property
    def hidden_fraction(self) -> float | None:
        """Share of the communication that is hidden behind kernels; None without communication."""
        return self.hidden_kernels_us / self.comm_us if self.comm_us else None

    def as_object(self) -> dict[str, Any]:
        return {**asdict(self), "hidden_fraction": self.hidden_fraction}


def analyze(trace: Trace, names: Names = NAMES, phases: Phases | None = None) -> tuple[Analysis, ...]:
    """Return an analysis of each device with events, sorted by name. phases: those of the trace, if known."""
    trace = host_as_device(trace, names)
    by_device = _group(trace.device_events, attrgetter("device"))
    phases = phases or Phases(trace, names)
    return tuple(_analyze(device, by_device[device], trace, names, phases) for device in sorted(by_device))


def _analyze(device: str, events: Sequence[DeviceEvent], trace: Trace, names: Names, phases: Phases) -> Analysis:
    by_kind = {"compute": [], "comm": [], "copy": []} | _group(events, names.kind_of)
    compute = union(intervals_of([*by_kind["compute"], *by_kind["copy"]]))
    kernels, comm, copies = (union(intervals_of(by_kind[kind])) for kind in ("compute", "comm", "copy"))
    busy = union(intervals_of(events))
    exposed = difference(comm, compute)
    extent = np.array([[busy[0, 0], busy[-1, 1]]]) if len(busy) else EMPTY
    window = total(extent)
    streams = _group(events, attrgetter("stream"))
    return Analysis(
        device=device, window_us=window, busy_us=total(busy), idle_us=window - total(busy),
        compute_us=total(compute), kernel_compute_us=total(kernels), comm_us=total(comm), copy_us=total(copies),
        overlapped_us=total(intersection(comm, compute)), hidden_kernels_us=total(intersection(comm, kernels)),
        exposed_comm_us=total(exposed),
        num_comm=len(by_kind["comm"]), num_sms=trace.num_sms or None,
        comm_blocks=max((event.blocks for event in by_kind["comm"]), default=0) or None,
        phases=_phases(by_kind, trace, phases, exposed),
        waits=find_waits(trace, phases, difference(extent, kernels), *by_kind.values()),
        streams={stream: total(union(intervals_of(streams[stream]))) for stream in sorted(streams)},
        kernels=_kernels(by_kind),
    )  # fmt: skip


def _phases(
    by_kind: dict[str, list[DeviceEvent]], trace: Trace, phases: Phases, exposed: Intervals
) -> tuple[Phase, ...]:
    launched: dict[str, dict[str, list[DeviceEvent]]] = defaultdict(lambda: {kind: [] for kind in by_kind})
    for kind, events in by_kind.items():
        for event in events:
            launched[phases.phase_of(event)][kind].append(event)
    found = []
    times_waited = Counter(without_wait(wait.name) for wait in trace.waits)
    order = {name: number for number, name in enumerate(phases.times)}
    for name in sorted((name for name in launched if name), key=lambda name: order.get(name, len(order))):
        comm_exposed = total(intersection(union(intervals_of(launched[name]["comm"])), exposed))
        compute, comm, copies = (_sum(events) for events in launched[name].values())
        times = phases.times[name] - times_waited[name] if name in order else len(launched[name]["comm"])
        found.append(Phase(name, max(times, 1), compute, comm, copies, comm_exposed))
    return tuple(found)


def _group(events: Iterable[DeviceEvent], key: Callable[[DeviceEvent], str]) -> dict[str, list[DeviceEvent]]:
    groups: dict[str, list[DeviceEvent]] = defaultdict(list)
    for event in events:
        groups[key(event)].append(event)
    return groups


def _sum(events: Iterable[DeviceEvent]) -> float:
    return sum(event.end - event.start for event in events)


def _kernels(by_kind: dict[str, list[DeviceEvent]]) -> tuple[Kernel, ...]:
    kernels = [
        Kernel(name, kind, len(same), _sum(same), max(event.blocks for event in same) or None)
        for kind, events in by_kind.items()
        for name, same in _group(events, attrgetter("name")).items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.total_us))
