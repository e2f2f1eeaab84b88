"""Analyze the trace files of one measurement together: one file per rank, with one or more devices each."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...messages import plural, printable
from .account import TRANSFER, relabeled
from .analyze import Analysis, analyze_device, devices_of
from .categories import may_communicate, short_name
from .communication import NAMES, Names
from .doctor.diagnose import diagnose
from .host import as_device
from .pictures.picture import Picture
from .ranks import RankComparison, compare_traces, waits_for_ranks
from .reading import read_traces
from .report import analysis_text, compare_ranks, verdicts_text
from .trace import DeviceEvent, Trace, TraceError
from .windows import Choice, window_of

_LAUNCH = re.compile(r"Launch|Memcpy|Memset|enqueue|runFunction", re.IGNORECASE)


@dataclass(frozen=True)
class TracedDevice:
    """One device of one trace."""

    path: Path
    trace: Trace
    """What is analyzed: the events of this device, without other steps. Without causes, no events are kept."""
    analysis: Analysis
    remarks: Sequence[str]
    """Sentences about damage in the file, and about kernels that may communicate."""
    left_out: str = ""
    """A sentence about the steps that are analyzed; "" if the whole recording is."""

    @property
    def name(self) -> str:
        label = printable(self.trace.label, 60)
        return ", ".join(filter(None, [label, self.analysis.name]))

    def picture(self, title: str, starts_at: float = 0.0) -> Picture:
        """The picture of this device. `starts_at` is the place of its first event on the time axis."""
        found, shift = self.analysis, starts_at - self.trace.start_us
        events = sorted(self.trace.device_events, key=lambda event: event.start)
        return Picture(title + found.hidden_sentence, events, shift, found.account, found.verdicts)


@dataclass(frozen=True)
class TraceFiles:
    """The devices of all files, and the comparison of their collectives."""

    devices: Sequence[TracedDevice]
    comparison: RankComparison

    @property
    def names(self) -> list[str]:
        """Distinct names: the ranks if all devices have different ones, otherwise file and device."""
        numbers = [device.trace.rank for device in self.devices]
        if None not in numbers and len(set(numbers)) == len(numbers):
            return [f"rank {number}" for number in numbers]
        return [f"{printable(one.path)}, {one.name}" for one in self.devices]

    @property
    def remarks(self) -> list[str]:
        """Lines about damage in the files, and about kernels that may communicate."""
        return [*dict.fromkeys(f"{printable(one.path)}: {text}" for one in self.devices for text in one.remarks)]

    def pictures(self) -> list[Picture]:
        """One picture per device, on one time axis. If the ranks' clocks cannot be compared, each starts at 0."""
        known = [shift for shift in self.comparison.shifts_us if shift is not None]
        aligned = len(known) == len(self.devices)
        shifts = [shift - min(known) for shift in known] if aligned else [0.0] * len(self.devices)
        names = self.names if len(self.devices) > 1 else [self.devices[0].name]
        rows = zip(self.devices, names, shifts, strict=True)
        return [device.picture(f"{name}: ", shift) for device, name, shift in rows]

    def as_text(self, phases: bool = False) -> str:
        """The report of each device and, if there are several, a table that compares them."""
        parts = []
        for one in self.devices:
            path = ", ".join(filter(None, [printable(one.path), printable(one.trace.label, 60)]))
            parts.append("\n".join(filter(None, [path, one.left_out, analysis_text(one.analysis, phases)])))
            parts.append(verdicts_text(one.analysis))
        if len(self.devices) > 1:
            sentences = [printable(sentence, 300) for sentence in self.comparison.sentences]
            parts += [compare_ranks(self.names, [one.analysis for one in self.devices]), "\n".join(sentences)]
        return "\n\n".join(filter(None, parts))

    def as_objects(self) -> list[dict[str, Any]]:
        """A JSON object for each device."""
        return [
            {
                "trace": str(one.path), "rank": one.trace.rank, "remarks": one.remarks, "left_out": one.left_out,
                "shift_us": shift, **one.analysis.as_object(), "problems": self.comparison.sentences,
            }
            for one, shift in zip(self.devices, self.comparison.shifts_us, strict=True)
        ]  # fmt: skip


def analyze_files(
    paths: Sequence[Path], names: Names = NAMES, steps: Choice = "default", causes: bool = True
) -> TraceFiles:
    """Read, analyze and compare trace files.

    Raises TraceError for a file that is not a trace or has no device events.
    steps: which to analyze; ValueError if they are not recorded.
    causes: find the causes of lost time, and divide exposed communication into waits for ranks and transfers.
    """
    traces = ((path, trace) for path in paths for trace in read_traces(path))
    devices = [device for path, trace in traces for device in _devices(path, trace, names, steps, causes)]
    if not causes:
        return TraceFiles(devices, compare_traces([]))
    if all(device.trace.rank is not None for device in devices):
        devices.sort(key=lambda device: device.trace.rank or 0)
    found = TraceFiles(devices, compare_traces([device.trace for device in devices]))
    analyses = [
        replace(device.analysis, account=tuple(relabeled(device.analysis.account, waits, [TRANSFER])))
        for device, waits in zip(devices, waits_for_ranks(found.comparison, found.names), strict=True)
    ]
    complete = diagnose([device.trace for device in devices], analyses, found.names, found.comparison)
    return replace(
        found, devices=[replace(device, analysis=one) for device, one in zip(devices, complete, strict=True)]
    )


def _devices(path: Path, trace: Trace, names: Names, steps: Choice, causes: bool) -> list[TracedDevice]:
    """The devices of a trace that was read from `path`. Raises TraceError if nothing on them takes time."""
    _refuse_launches_alone(path, trace)
    found = []
    for device in devices_of(as_device(trace, names)):
        window = window_of(device, steps)
        analysis = analyze_device(window.trace)
        if analysis.window_us:
            analysis = replace(analysis, steps=tuple(window.steps))
            kept = window.trace if causes else Trace(rank=trace.rank, label=trace.label)
            remarks = _remarks(window.trace, names)
            found.append(TracedDevice(path, kept, analysis, remarks, window.left_out))
    if not found:
        raise TraceError(
            f"{path}: there is no kernel on a device, and no operator on a CPU, in {plural(trace.num_events, 'event')}"
        )
    return found


def _remarks(trace: Trace, names: Names) -> list[str]:
    """Sentences about damage in the file, and about kernels that may communicate."""
    found = list(trace.notes)
    if trace.truncated:
        found.append(f"the file is cut off: only the first {trace.num_events:,} events are analyzed")
    for what, number in (("skipped", trace.skipped), ("repaired", trace.repaired)):
        found += [f"{plural(number, 'damaged event')} {what}"] * (number > 0)
    return found + _kernels_that_may_communicate(trace.device_events, names)


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
