"""Sum up a recording per step: what its devices did, in how many kernels, and what was in flight.

A step begins when the host has begun it and the device has finished what was launched before: the host runs ahead of a
device. Each moment of a step belongs to one piece of work (partition.py), so that all work and the idle time add up to
the step. A recording can have several devices: its numbers are means over them.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np

from ..overlap.labels import step_number
from .categories import COMMUNICATION, category_of
from .collectives import kind_of_collective
from .communication import NAMES, Names
from .doctor.diagnose import Examined, conclude
from .doctor.verdict import Verdict
from .files import analyze_devices
from .host import host_as_device
from .intervals import intersection, intervals_of, total, union
from .partition import IDLE, Label, divide
from .reading import read_trace
from .trace import DeviceEvent, HostEvent, Trace

IDLE_TIME = IDLE.category
_STARTUP = 1.5
"""The first step is left out if it takes this many times as long as the median of at least two others."""


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
    """By category and name of the kernel; transfers by kind. With IDLE_TIME, adds up to the step."""
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
    gpus: tuple[str, ...]
    """Names of the GPUs; () if unknown."""
    world_size: int | None
    """Number of ranks of the job; None if unknown."""
    steps: int
    """Number of steps that were recorded, at least, on every device; 0: none."""
    whole: Sums
    per_step: Sums | None
    """None if a device has no recorded steps."""
    verdicts: tuple[Verdict, ...]
    """The cause with the largest gain of each kind, on any device."""
    remarks: tuple[tuple[Path, str], ...]
    """Sentences about damaged and incomplete files."""


def read_recording(name: str, paths: Sequence[Path], names: Names = NAMES) -> Recording:
    """Read the files of one recording. Raises TraceError for a file that is not a trace or has no device events."""
    examined: list[Examined | None] = []
    remarks: dict[tuple[Path, str], None] = {}
    found: list[tuple[int, Sums, Sums | None]] = []
    gpus, sizes = set(), set()
    for path in paths:
        trace = host_as_device(read_trace(path), names)
        here = analyze_devices(path, trace, names, False, examined)
        found += [_sum_up(trace, device.analysis.device, names) for device in here]
        for device in here:
            cut = [f"the file is incomplete: {device.truncated:,} events are read"] * bool(device.truncated)
            remarks |= {(path, sentence): None for sentence in (*cut, *device.remarks)}
        gpus.add(trace.gpu)
        sizes.add(trace.world_size)
    counts, wholes, steps = zip(*found, strict=True)
    known = [one for one in steps if one is not None]
    per_step = _mean(known) if len(known) == len(steps) else None
    return Recording(
        name, len(found), tuple(sorted(gpus - {""})), sizes.pop() if len(sizes) == 1 else None,
        min(counts), _mean(wholes), per_step, _largest(conclude(examined)), tuple(remarks),
    )  # fmt: skip


def _largest(verdicts: Iterable[Sequence[Verdict]]) -> tuple[Verdict, ...]:
    by_kind: dict[str, Verdict] = {}
    for verdict in sorted((v for found in verdicts for v in found), key=lambda v: -(v.gain_fraction or 0.0)):
        by_kind.setdefault(verdict.kind, verdict)
    return tuple(by_kind.values())


def _sum_up(trace: Trace, device: str, names: Names) -> tuple[int, Sums, Sums | None]:
    """The number of steps on one device, the sums of all, and those of one step."""
    events = [event for event in trace.device_events if event.device == device]
    kinds = [names.kind_of(event) for event in events]

    def label_of(event: DeviceEvent, kind: str) -> Label:
        category = category_of(event, kind)
        return Label(category, (kind_of_collective(event) or event.name) if kind == "comm" else event.name)

    labels = {id(event): label_of(event, kind) for event, kind in zip(events, kinds, strict=True)}
    by_kind = {wanted: [event for event, kind in zip(events, kinds, strict=True) if kind == wanted]
               for wanted in ("compute", "copy", "comm")}  # fmt: skip
    divided = divide([*by_kind["compute"], *by_kind["copy"]], by_kind["comm"], lambda event: labels[id(event)])
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
        shares = {label: float(us[0]) for label, us in divided.between(span[:, 0], span[:, 1]).items()}
        work = {
            (label.category, label.phase): Work(counts[label] / steps, durations[label] / steps, us / steps)
            for label, us in shares.items()
        }
        return Sums(
            (end - start) / steps, work,
            total(intersection(comm, span)) / steps, total(intersection(hidden, span)) / steps,
        )  # fmt: skip

    whole = sums(divided.start, divided.end, 1)
    span = _steps_of(trace, events)
    return (span[2], whole, sums(*span)) if span else (0, whole, None)


def _steps_of(trace: Trace, events: Sequence[DeviceEvent]) -> tuple[float, float, int] | None:
    """When the steps begin and end on the device, and their number. None if none is recorded."""
    named = trace.steps or [event for event in trace.annotations if step_number(event.name) is not None]
    steps = sorted({event.name: event for event in reversed(named)}.values(), key=lambda event: event.start)
    if len(steps) > 2 and _length(steps[0]) > _STARTUP * median(map(_length, steps[1:])):
        steps = steps[1:]
    if not steps:
        return None
    launched = [None if event.correlation is None else trace.launches.get(event.correlation) for event in events]
    times = [event.start if launch is None else launch.start for event, launch in zip(events, launched, strict=True)]

    def reached(time: float) -> float:
        return max([time, *(event.end for event, begun in zip(events, times, strict=True) if begun < time)])

    start, end = reached(steps[0].start), reached(steps[-1].end)
    return (start, end, len(steps)) if any(start <= event.start < end for event in events) else None


def _length(step: HostEvent) -> float:
    return step.end - step.start


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
    """Transfers by kind, such as "all_to_all"; those without a known kind by the name of their kernel."""
    return {name: work for (category, name), work in sums.work.items() if category == COMMUNICATION}
