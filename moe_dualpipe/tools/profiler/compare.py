"""Compare two recordings: the account of a step twice, and the differences, which add up.

So that steps of recordings of different lengths can be compared, one begins here when the host has begun it and the
device has finished all that was launched before; the last one ends when the next would begin. A recording can have
several devices: its numbers are means over them. If a recording has no steps, whole recordings are compared.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from .account import Key, account, without_next
from .communication import NAMES, Names
from .files import analyze_devices
from .host import host_as_device
from .intervals import intersection, intervals_of, union, union_length
from .reading import read_trace
from .trace import DeviceEvent, Trace
from .windows import Choice, DeviceStep, window_of


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels, copies or transfers of one name, per step and device."""

    count: float = 0.0
    total_us: float = 0.0
    """Sum of their durations."""


@dataclass(frozen=True, slots=True)
class Sums:
    """One step, or a whole recording, of one device. Times are in microseconds."""

    step_us: float
    account: Mapping[Key, float]
    """The time of each kind and detail. Adds up to the step."""
    kernels: Mapping[str, Kernels]
    comm_us: float
    hidden_us: float
    """Communication while a kernel computes."""


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
            found.append(_sums(trace, device.analysis.device, window.steps, names))
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
    per_step = _mean(known, len(known)) if len(known) == len(by_step) else None
    return Recording(
        name, len(found), on_cpu, tuple(sorted(gpus - {""})), sizes.pop() if len(sizes) == 1 else None,
        min(counts), _mean(wholes, len(wholes)), per_step, tuple(remarks),
    )  # fmt: skip


def _sums(trace: Trace, device: str, steps: Sequence[DeviceStep], names: Names) -> tuple[int, Sums, Sums | None]:
    """The number of steps on one device, the sums of the whole recording, and those of one step."""
    events = [event for event in trace.device_events if event.device == device]
    part = replace(trace, device_events=events)

    def sums(start: float, end: float, steps: int) -> Sums:
        inside = [event for event in events if start <= event.start < end]
        kernels: dict[str, Kernels] = defaultdict(Kernels)
        for event in inside:
            known = kernels[event.name]
            kernels[event.name] = Kernels(known.count + 1, known.total_us + event.end - event.start)
        divided: dict[Key, float] = defaultdict(float)
        for entry in account(part, names, span=(start, end)):
            divided[entry.kind, without_next(entry.detail)] += entry.us
        of_kind = [[event for event in events if names.kind_of(event) == kind] for kind in ("comm", "compute")]
        comm, computing = (union(intervals_of(own).clip(start, end)) for own in of_kind)
        hidden = intersection(comm, computing)
        return _mean([Sums(end - start, divided, kernels, union_length(comm), union_length(hidden))], steps)

    whole = sums(min(event.start for event in events), max(event.end for event in events), 1)
    if not steps:
        return 0, whole, None
    begin, end = (_reached(trace, events, time) for time in (steps[0].launched[0], steps[-1].launched[1]))
    return len(steps), whole, sums(begin, end, len(steps))


def _reached(trace: Trace, events: Sequence[DeviceEvent], time: float) -> float:
    """When all that the host launched before `time` is done. What runs before all work with a recorded launch was
    launched before the recording."""
    launches = [trace.launch_of(event) for event in events]
    first = min((event.start for event, launch in zip(events, launches, strict=True) if launch), default=-inf)
    begun = (
        launch.start if launch else event.start if event.start >= first else -inf
        for event, launch in zip(events, launches, strict=True)
    )
    return max([time, *(event.end for event, start in zip(events, begun, strict=True) if start < time)])


def _mean(found: Sequence[Sums], divisor: int) -> Sums:
    """The sum of all, divided."""
    times: dict[Key, float] = defaultdict(float)
    kernels: dict[str, Kernels] = defaultdict(Kernels)
    for sums in found:
        for key, us in sums.account.items():
            times[key] += us / divisor
        for name, one in sums.kernels.items():
            known = kernels[name]
            kernels[name] = Kernels(known.count + one.count / divisor, known.total_us + one.total_us / divisor)
    step, comm, hidden = (
        sum(getattr(one, key) for one in found) / divisor for key in ("step_us", "comm_us", "hidden_us")
    )
    return Sums(step, times, kernels, comm, hidden)


@dataclass(frozen=True)
class Comparison:
    """Two recordings. Numbers are per step if `by_step`, otherwise of the whole recordings."""

    a: Recording
    b: Recording

    @property
    def by_step(self) -> bool:
        return self.a.per_step is not None and self.b.per_step is not None

    @property
    def sums(self) -> tuple[Sums, Sums]:
        if self.a.per_step is not None and self.b.per_step is not None:
            return self.a.per_step, self.b.per_step
        return self.a.whole, self.b.whole

    @property
    def difference_us(self) -> float:
        """How much longer the step of B is."""
        a, b = self.sums
        return b.step_us - a.step_us

    @property
    def account(self) -> dict[Key, tuple[float, float]]:
        """The time of each kind and detail in A and B, the largest difference first."""
        a, b = (sums.account for sums in self.sums)
        found = {key: (a.get(key, 0.0), b.get(key, 0.0)) for key in {**a, **b}}
        return dict(sorted(found.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0])))

    @property
    def kernels(self) -> dict[str, tuple[Kernels, Kernels]]:
        """The kernels, copies and transfers of each name in A and B, the largest difference first."""
        a, b = (sums.kernels for sums in self.sums)
        found = {name: (a.get(name, Kernels()), b.get(name, Kernels())) for name in {**a, **b}}
        return dict(sorted(found.items(), key=lambda item: (-abs(item[1][1].total_us - item[1][0].total_us), item[0])))

    @property
    def unlike(self) -> list[str]:
        """Sentences about what was not recorded alike."""
        a, b = self.a, self.b
        found = []
        if a.gpus and b.gpus and a.gpus != b.gpus:
            found.append(f"Different GPUs: {', '.join(a.gpus)} in A, {', '.join(b.gpus)} in B.")
        if a.devices != b.devices:
            found.append(f"A has {a.devices} and B has {b.devices} devices: all numbers are means over devices.")
        if a.world_size and b.world_size and a.world_size != b.world_size:
            found.append(f"The job of A has {a.world_size:,} ranks, that of B {b.world_size:,}.")
        return found

    def as_object(self) -> dict[str, Any]:
        """A JSON object."""
        sides = {}
        for key, recording, sums in zip("ab", (self.a, self.b), self.sums, strict=True):
            sides[key] = {
                "name": recording.name, "devices": recording.devices, "gpus": list(recording.gpus),
                "world_size": recording.world_size, "steps": recording.steps, "step_us": sums.step_us,
                "comm_us": sums.comm_us, "hidden_kernels_us": sums.hidden_us,
            }  # fmt: skip
        return {
            "by_step": self.by_step, **sides, "difference_us": self.difference_us, "unlike": self.unlike,
            "account": [{"kind": kind, "detail": detail, "a_us": a, "b_us": b, "difference_us": b - a}
                        for (kind, detail), (a, b) in self.account.items()],
            "kernels": [{"name": name, "a": asdict(a), "b": asdict(b)} for name, (a, b) in self.kernels.items()],
        }  # fmt: skip
