"""Sum up a recording per step: what its devices did, in how many kernels, and what was in flight.

windows.py finds the steps. So that steps of recordings of different lengths can be compared, one begins here when the
host has begun it and the device has finished all that was launched before; the last one ends when the next would begin.
Each moment belongs to one piece of work (partition.py), so that all work and the idle time add up to the step. A
recording can have several devices: its numbers are means over them.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

import numpy as np

from .attribution import IDLE, LATE_HOST, Label, divide, late_host
from .categories import COMMUNICATION, category_of
from .collectives import name_of_collective
from .communication import NAMES, Names
from .files import analyze_devices
from .host import host_as_device
from .intervals import Intervals, intersection, intervals_of, union, union_length
from .reading import read_trace
from .trace import DeviceEvent, Trace
from .windows import Choice, DeviceStep, window_of

IDLE_TIME, LATE_LAUNCHES = IDLE.category, LATE_HOST.category
NO_WORK = IDLE_TIME, LATE_LAUNCHES
"""Categories of the time in which a device does nothing."""


@dataclass(frozen=True, slots=True)
class Work:
    """Kernels, copies or transfers of one sort, per step and device."""

    count: float = 0.0
    total_us: float = 0.0
    """Sum of their durations."""
    step_us: float = 0.0
    """The part of the step that they take. Of transfers, the exposed part."""

    def __add__(self, other: "Work") -> "Work":
        return Work(self.count + other.count, self.total_us + other.total_us, self.step_us + other.step_us)


@dataclass(frozen=True, slots=True)
class Sums:
    """One step, or a whole recording. Times are in microseconds."""

    step_us: float
    work: Mapping[tuple[str, str], Work]
    """By category and name of the kernel; transfers by kind. With NO_WORK, adds up to the step."""
    comm_us: float
    hidden_us: float
    """Communication while a kernel computes."""

    def by_category(self) -> dict[str, Work]:
        """The work of each category."""
        found: dict[str, Work] = defaultdict(Work)
        for (category, _), work in self.work.items():
            found[category] += work
        return dict(found)


@dataclass(frozen=True, slots=True)
class Recording:
    """One or more devices, recorded together."""

    name: str
    devices: int
    on_cpu: bool
    """The device is a CPU, and its work consists of operators."""
    gpus: tuple[str, ...]
    """Names of the GPUs; () if unknown."""
    world_size: int | None
    """Number of ranks of the job; None if unknown."""
    steps: int
    """Number of steps that were recorded, at least, on every device; 0: none."""
    whole: Sums
    per_step: Sums | None
    """None if a device has no recorded steps."""
    remarks: tuple[tuple[Path, str], ...]
    """Sentences about damaged and incomplete files, and about what is left out."""


def read_recording(
    name: str, paths: Sequence[Path], names: Names = NAMES, steps: Choice = "default"
) -> Recording:  # fmt: skip
    """Read the files of one recording. Raises TraceError for a file that is not a trace or has no device events.

    steps: which to analyze; ValueError if they are not recorded.
    """
    remarks: dict[tuple[Path, str], None] = {}
    found: list[tuple[int, Sums, Sums | None]] = []
    gpus, sizes = set(), set()
    on_cpu = False
    like: range | None = None
    for path in paths:
        trace = host_as_device(read_trace(path), names)
        for device in analyze_devices(path, trace, names, False, steps=steps, like=like):
            window = window_of(trace, device.analysis.device, steps, names, like)
            found.append(_sum_up(trace, device.analysis.device, window.steps, names))
            like = like or window.numbers
            on_cpu = device.analysis.device == "cpu"
            cut = [f"the file is incomplete: {device.truncated:,} events are read"] * bool(device.truncated)
            remarks |= {
                (path, sentence): None for sentence in (*cut, *device.remarks, *filter(None, [device.left_out]))
            }
        gpus.add("" if on_cpu else trace.gpu)
        sizes.add(trace.world_size)
    counts, wholes, by_step = zip(*found, strict=True)
    known = [one for one in by_step if one is not None]
    per_step = _mean(known) if len(known) == len(by_step) else None
    return Recording(
        name, len(found), on_cpu, tuple(sorted(gpus - {""})), sizes.pop() if len(sizes) == 1 else None,
        min(counts), _mean(wholes), per_step, tuple(remarks),
    )  # fmt: skip


def _sum_up(
    trace: Trace, device: str, steps: Sequence[DeviceStep], names: Names
) -> tuple[int, Sums, Sums | None]:  # fmt: skip
    """The number of steps on one device, the sums of the whole recording, and those of one step."""
    events = [event for event in trace.device_events if event.device == device]
    kinds = [names.kind_of(event) for event in events]

    def label_of(event: DeviceEvent, kind: str) -> Label:
        return Label(category_of(event, kind), name_of_collective(event) if kind == "comm" else event.name)

    labels = {id(event): label_of(event, kind) for event, kind in zip(events, kinds, strict=True)}
    by_kind = {wanted: [event for event, kind in zip(events, kinds, strict=True) if kind == wanted]
               for wanted in ("compute", "copy", "comm")}  # fmt: skip
    reached = _reached(trace, events)
    span = (reached(steps[0].launched[0]), reached(steps[-1].launched[1])) if steps else None
    divided = divide(
        [*by_kind["compute"], *by_kind["copy"]], by_kind["comm"], lambda event: labels[id(event)],
        _late_host(trace, events, span),
    )  # fmt: skip
    comm, kernels = (union(intervals_of(by_kind[kind])) for kind in ("comm", "compute"))
    hidden = intersection(comm, kernels)

    def sums(start: float, end: float, steps: int) -> Sums:
        span = np.array([[start, end]])
        counts: dict[Label, int] = defaultdict(int)
        durations: dict[Label, float] = defaultdict(float)
        for event in events:
            if start <= event.start < end:
                counts[labels[id(event)]] += 1
                durations[labels[id(event)]] += event.end - event.start
        owned = {label: float(us[0]) for label, us in divided.between(span[:, 0], span[:, 1]).items()}
        work = {
            (label.category, label.phase): Work(
                counts[label] / steps, durations[label] / steps, owned.get(label, 0.0) / steps
            )
            for label in {**owned, **counts}
        }  # also work that is hidden behind other work at all times
        return Sums(
            (end - start) / steps, work, *(union_length(intersection(one, span)) / steps for one in (comm, hidden))
        )

    whole = sums(divided.start, divided.end, 1)
    return len(steps), whole, sums(*span, len(steps)) if span else None


def _late_host(trace: Trace, events: Sequence[DeviceEvent], span: tuple[float, float] | None) -> Intervals:
    """The time in which nothing was launched, also between the ends of `span` and the first and the last event."""
    found = late_host(trace, events)
    if span is None or not trace.launches or events[0].device == "cpu":
        return found
    first = min(events, key=lambda event: event.start)
    launch = trace.launch_of(first)
    before = (span[0], min(launch.end, first.start)) if launch else (0.0, 0.0)
    after = (max(event.end for event in events), span[1])
    return union(np.concatenate([found, [before, after]]))


def _reached(trace: Trace, events: Sequence[DeviceEvent]) -> Callable[[float], float]:
    """Return a function that maps a time of the host to the moment when all earlier launches are done, too.

    What runs before all work with a recorded launch was launched before the recording.
    """
    launches = [trace.launch_of(event) for event in events]
    first = min((event.start for event, launch in zip(events, launches, strict=True) if launch), default=-inf)
    begun = [
        launch.start if launch else event.start if event.start >= first else -inf
        for event, launch in zip(events, launches, strict=True)
    ]
    return lambda time: max([time, *(event.end for event, start in zip(events, begun, strict=True) if start < time)])


def _mean(found: Sequence[Sums]) -> Sums:
    share = 1 / len(found)
    work: dict[tuple[str, str], Work] = defaultdict(Work)
    for sums in found:
        for key, one in sums.work.items():
            work[key] += Work(one.count * share, one.total_us * share, one.step_us * share)
    lengths, comm, hidden = (
        sum(getattr(sums, key) for sums in found) * share for key in ("step_us", "comm_us", "hidden_us")
    )
    return Sums(lengths, dict(work), comm, hidden)


def transfers_of(sums: Sums) -> dict[str, Work]:
    """Transfers by kind, such as "all_to_all"; those without a known kind by the name of their function."""
    return {name: work for (category, name), work in sums.work.items() if category == COMMUNICATION}
