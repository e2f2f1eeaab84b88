"""Analyze the trace files of one measurement together: one file per rank, with one or more devices each."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...messages import plural, printable
from .account import TRANSFER, relabeled
from .analyze import Analysis, analyze
from .categories import may_communicate
from .communication import NAMES, Names
from .doctor.diagnose import Examined, conclude, examine
from .host import host_as_device
from .kernel_names import short_name
from .phases import Phases
from .pictures.picture import Picture, Work, work_of
from .ranks import RankComparison, RankTransfers, compare_traces, waits_for_ranks
from .reading import read_traces
from .trace import DeviceEvent, Trace, TraceError
from .windows import Choice, window_of

_LAUNCH = re.compile(r"Launch|Memcpy|Memset|enqueue|runFunction", re.IGNORECASE)


@dataclass(frozen=True)
class TracedDevice:
    """One device of one trace."""

    path: Path
    rank: int | None
    analysis: Analysis
    work: tuple[Work, ...]
    """The events that pictures show; () without pictures."""
    transfers: RankTransfers
    remarks: tuple[str, ...] = ()
    """Sentences about damage in the file, and about kernels that may communicate."""
    left_out: str = ""
    """A sentence about the steps that are analyzed; "" if the whole recording is."""
    label: str = ""
    """Which rank of its file it is; "" if the file has one."""

    @property
    def name(self) -> str:
        return f"{printable(self.label, 60)}, {self.analysis.name}" if self.label else self.analysis.name

    def picture(self, title: str, starts_at: float = 0.0) -> Picture:
        """The picture of this device. `starts_at` is the place of its first event on the time axis."""
        found, shift = self.analysis, starts_at - self.transfers.start_us
        return Picture(title + found.hidden_sentence, self.work, shift, found.account, found.verdicts)


@dataclass(frozen=True)
class TraceFiles:
    """The devices of all files, and the comparison of their collectives."""

    devices: Sequence[TracedDevice]
    comparison: RankComparison

    @property
    def names(self) -> list[str]:
        """Short, distinct names: the ranks if all devices have different ones, otherwise file and device, or the device
        alone in a single file of several devices."""
        numbers = [device.rank for device in self.devices]
        if None not in numbers and len(set(numbers)) == len(numbers):
            return [f"rank {number}" for number in numbers]
        names = [device.name for device in self.devices]
        if len({device.path for device in self.devices}) > 1 or len(self.devices) == 1:
            names = [f"{printable(one.path)}, {name}" for one, name in zip(self.devices, names, strict=True)]
        return names if len(set(names)) == len(names) else [f"{i}: {name}" for i, name in enumerate(names)]

    @property
    def remarks(self) -> dict[Path, tuple[str, ...]]:
        """The files to which there is something to say: damage, and kernels that may communicate."""
        found: dict[Path, dict[str, None]] = defaultdict(dict)
        for device in self.devices:
            found[device.path].update(dict.fromkeys(device.remarks))
        return {path: tuple(sentences) for path, sentences in found.items() if sentences}

    def pictures(self) -> list[Picture]:
        """One picture per device, on one time axis. If the ranks' clocks cannot be compared, each starts at 0."""
        known = [shift for shift in self.comparison.shifts_us if shift is not None]
        aligned = len(known) == len(self.devices)
        shifts = [shift - min(known) for shift in known] if aligned else [0.0] * len(self.devices)
        names = self.names if len(self.devices) > 1 else [self.devices[0].name]
        rows = zip(self.devices, names, shifts, strict=True)
        return [device.picture(f"{name}: ", shift) for device, name, shift in rows]

    def as_objects(self) -> list[dict[str, Any]]:
        """A JSON object for each device."""
        return [
            {
                "trace": str(device.path), "rank": device.rank, "remarks": device.remarks, "left_out": device.left_out,
                "shift_us": shift, **device.analysis.as_object(), "problems": self.comparison.sentences,
            }
            for device, shift in zip(self.devices, self.comparison.shifts_us, strict=True)
        ]  # fmt: skip


def analyze_files(
    paths: Sequence[Path], names: Names = NAMES, pictures: bool = True, steps: Choice = "default", causes: bool = True
) -> TraceFiles:
    """Read, analyze and compare trace files.

    Raises TraceError for a file that is not a trace or has no device events.
    pictures: also collect what pictures need. steps: which to analyze; ValueError if they are not recorded.
    causes: find the causes of lost time, and divide exposed communication into waits for ranks and transfers.
    """
    examined: list[Examined | None] = []
    devices: list[TracedDevice] = []
    for path in paths:
        for trace in read_traces(path):
            devices += analyze_devices(path, trace, names, pictures, examined if causes else None, steps)
    if not causes:
        return TraceFiles(devices, compare_traces([]))
    order = range(len(devices))
    if all(device.rank is not None for device in devices):
        order = sorted(order, key=lambda position: devices[position].rank or 0)
    devices, examined = [devices[position] for position in order], [examined[position] for position in order]
    found = TraceFiles(devices, compare_traces([device.transfers for device in devices]))
    waits = waits_for_ranks(found.comparison, found.names)
    accounts = [relabeled(one.analysis.account, own, [TRANSFER]) for one, own in zip(devices, waits, strict=True)]
    complete = [
        replace(device, analysis=replace(device.analysis, **one._asdict()))
        for device, one in zip(devices, conclude(examined, accounts, found.comparison), strict=True)
    ]
    return replace(found, devices=complete)


def analyze_devices(
    path: Path, trace: Trace, names: Names = NAMES, pictures: bool = True,
    examined: list[Examined | None] | None = None, steps: Choice = "all",
) -> list[TracedDevice]:  # fmt: skip
    """Analyze the devices of a trace that was read from `path`. Raises TraceError if it has no device events.

    examined: a list to which to add what the search for causes finds on each device (doctor/diagnose.py).
    steps: which steps to analyze (windows.py); ValueError if they are not recorded.
    """
    _refuse_launches_alone(path, trace)
    trace = host_as_device(trace, names)
    if not trace.device_events:
        raise TraceError(
            f"{path}: there is no kernel on a device, and no operator on a CPU, in {plural(trace.num_events, 'event')}"
        )
    devices = []
    for device in sorted({event.device for event in trace.device_events}):
        window = window_of(trace, device, steps, names)
        part, events = window.trace, window.trace.device_events
        phases = Phases(part, names)
        (analysis,) = analyze(part, names, phases)
        analysis = replace(analysis, steps=tuple(window.steps))
        comm = [event for event in events if names.kind_of(event) == "comm"]
        start = min(event.start for event in events)
        transfers = RankTransfers(comm, start, trace.base_us, trace.host, trace.rank, trace.world_size)
        work = work_of(part, names, phases) if pictures else ()
        if examined is not None:
            rank = f"{trace.label or path.name}, {analysis.name}" if trace.rank is None else f"rank {trace.rank}"
            examined.append(examine(part, device, names.kind_of, rank))
        remarks = (*_remarks(trace), *_kernels_that_may_communicate(events, names))
        devices.append(TracedDevice(path, trace.rank, analysis, work, transfers, remarks, window.left_out, trace.label))
    return devices


def _remarks(trace: Trace) -> tuple[str, ...]:
    """Sentences about events that were skipped or repaired, and about the file."""
    found = list(trace.notes)
    if trace.truncated:
        found.append(f"the file is cut off: only the first {trace.num_events:,} events are analyzed")
    for what, number in (("skipped", trace.skipped), ("repaired", trace.repaired)):
        found += [f"{plural(number, 'damaged event')} {what}"] * (number > 0)
    return tuple(found)


def _kernels_that_may_communicate(events: Sequence[DeviceEvent], names: Names) -> list[str]:
    """A sentence if kernels count as computation, but are named like transfers."""
    times: dict[str, float] = defaultdict(float)
    for event in events:
        if event.category == "kernel" and names.is_unknown(event) and may_communicate(event.name):
            times[short_name(event.name)] += event.end - event.start
    longest = sorted(times, key=lambda name: -times[name])[:3]
    shown = ", ".join(f"{name} ({times[name]:,.0f} us)" for name in longest)
    use = "|".join(map(re.escape, longest))
    return [f"computation that may be communication: {shown}; if it is, use --comm '{use}'"] if shown else []


def _refuse_launches_alone(path: Path, trace: Trace) -> None:
    """Raise TraceError if the host launched work on a device but none of that work is recorded.

    Without this, the CPU would be analyzed as if it were the device.
    """
    if trace.device_events:
        return
    if launches := sum(1 for launch in trace.launches.values() if _LAUNCH.search(launch.name)):
        raise TraceError(
            f"{path}: no device work was recorded, only {plural(launches, 'launch', 'es')} of it: "
            "add the device to the activities of the profiler, such as ProfilerActivity.CUDA"
        )
