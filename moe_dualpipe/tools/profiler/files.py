"""Analyze the trace files of one measurement together: one file per rank, with one or more devices each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...messages import plural, printable
from .account import TRANSFER, WAITING, relabeled, spans_of
from .analyze import Analysis, analyze
from .collectives import Met, collective_rows
from .communication import NAMES, Names
from .doctor.diagnose import Examined, conclude, examine
from .host import host_as_device
from .lanes import Lanes, device_lanes
from .lateness import Lateness, lateness, waits_for_ranks
from .matching import RankTransfers
from .phases import Phases
from .ranks import Comparison, RankSkew, compare_traces
from .reading import read_trace
from .reading.remarks import damage, refuse_launches_alone, remarks
from .trace import Trace, TraceError
from .windows import Choice, step_spans, window_of


@dataclass(frozen=True)
class TracedDevice:
    """One device of one trace."""

    path: Path
    truncated: int
    """Number of events read from an incomplete file; 0 for a complete file."""
    rank: int | None
    analysis: Analysis
    lanes: Lanes | None
    """What pictures show; None if none are drawn."""
    transfers: RankTransfers
    remarks: tuple[str, ...] = ()
    """Sentences about damage in the file."""
    damage: Mapping[str, Any] = field(default_factory=dict)
    """Numbers of damaged events."""
    left_out: str = ""
    """Which steps are analyzed, and what is left out; "" if nothing is."""

    @property
    def steps(self) -> range | None:
        """The numbers of the analyzed steps, from the first to the last; None without steps."""
        found = self.analysis.steps
        return range(found[0].step, found[-1].step + 1) if found else None


@dataclass(frozen=True)
class TraceFiles:
    """The devices of all files, and what a comparison of them shows."""

    devices: Sequence[TracedDevice]
    comparisons: Sequence[Comparison]
    """One comparison of all devices, or one each of parts of them, in their order."""
    lateness: Sequence[Lateness | None] = ()
    """How each device delayed the others; () if that was not examined."""

    @property
    def skews(self) -> list[RankSkew]:
        """The skew of each device."""
        return [skew for comparison in self.comparisons for skew in comparison.skews]

    @property
    def problems(self) -> list[str]:
        """Sentences about what could not be compared, and why."""
        return [sentence for comparison in self.comparisons for sentence in comparison.sentences]

    @property
    def names(self) -> list[str]:
        """Short, distinct names: the ranks if all devices have different ones, otherwise file and device, or the device
        alone in a single file of several devices."""
        numbers = [device.rank for device in self.devices]
        by_rank = None not in numbers and len(set(numbers)) == len(numbers)
        in_file = {device.analysis.name for device in self.devices}
        alone = len({device.path for device in self.devices}) == 1 < len(self.devices) == len(in_file)
        files = ["" if alone else f"{printable(device.path)}, " for device in self.devices]
        names = [
            f"rank {device.rank}" if by_rank else f"{file}{device.analysis.name}"
            for device, file in zip(self.devices, files, strict=True)
        ]
        return names if len(set(names)) == len(names) else [f"{i}: {name}" for i, name in enumerate(names)]

    @property
    def truncated(self) -> dict[Path, int]:
        """The incomplete files, with the number of events read from each."""
        return {device.path: device.truncated for device in self.devices if device.truncated}

    @property
    def remarks(self) -> dict[Path, tuple[str, ...]]:
        """The damaged files, with sentences about the damage of each."""
        return {device.path: device.remarks for device in self.devices if device.remarks}

    def as_objects(self) -> list[dict[str, Any]]:
        """A JSON object for each device."""
        return [
            {
                "trace": str(device.path), "truncated": bool(device.truncated), "rank": device.rank,
                "left_out": device.left_out,
                "damage": device.damage,
                "waited_us": skew.waited_us, "shift_us": skew.shift_us, **device.analysis.as_object(),
                "problems": self.problems, **self._ranks_objects(position),
            }
            for position, (device, skew) in enumerate(zip(self.devices, self.skews, strict=True))
        ]  # fmt: skip

    def _ranks_objects(self, position: int) -> dict[str, Any]:
        """What a comparison tells about one device: null if it was not examined or is unknown."""
        late = self.lateness[position] if self.lateness else None
        return {"lateness": {**asdict(late), "reasons": [one._asdict() for one in late.reasons]} if late else None}


def analyze_files(
    paths: Sequence[Path], names: Names = NAMES, pictures: bool = True, steps: Choice = "default"
) -> TraceFiles:
    """Read and analyze trace files. Raises TraceError for a file that is not a trace or has no device events.

    pictures: also collect what pictures need. steps: which to analyze; ValueError if they are not recorded.
    """
    examined: list[Examined | None] = []
    devices: list[TracedDevice] = []
    for path in paths:
        like = devices[0].steps if devices else None
        devices += analyze_devices(path, read_trace(path), names, pictures, examined, steps, like)
    found = compare_devices(devices)
    accounts = [device.analysis.account for device in found.devices]
    complete = [
        replace(device, analysis=replace(device.analysis, **one._asdict()))
        for device, one in zip(found.devices, conclude(examined, accounts, found.comparisons[0]), strict=True)
    ]
    return replace(found, devices=complete)


def compare_devices(devices: Sequence[TracedDevice]) -> TraceFiles:
    """Compare the devices as ranks, and complete their analyses with the collectives."""
    comparison = compare_traces([device.transfers for device in devices])
    names = TraceFiles(devices, []).names
    complete = []
    for device, meetings, waits in zip(devices, comparison.joined, waits_for_ranks(comparison, names), strict=True):
        known = device.transfers
        met = {index: Met(meeting.shortest_us, meeting.complete) for index, meeting in meetings.items()}
        rows = collective_rows(known.transfers, known.exposed, met)
        divided = tuple(relabeled(device.analysis.account, waits, [TRANSFER]))
        complete.append(replace(device, analysis=replace(device.analysis, account=divided, collectives=rows)))
    late = lateness(comparison, names, [device.analysis.account for device in complete]) if len(devices) > 1 else ()
    return TraceFiles(complete, [comparison], late)


def analyze_devices(
    path: Path, trace: Trace, names: Names = NAMES, pictures: bool = True,
    examined: list[Examined | None] | None = None,
    steps: Choice = "all", like: range | None = None,
) -> list[TracedDevice]:  # fmt: skip
    """Analyze the devices of a trace that was read from `path`. Raises TraceError if it has no device events.

    examined: a list to which to add what the search for causes finds on each device (doctor/diagnose.py).
    steps, like: which steps to analyze (windows.py); ValueError if they are not recorded.
    """
    refuse_launches_alone(path, trace)
    trace = host_as_device(trace, names)
    if not trace.device_events:
        raise TraceError(
            f"{path}: there is no kernel on a device, and no operator on a CPU, in {plural(trace.num_events, 'event')}"
        )
    devices = []
    truncated = trace.num_events if trace.truncated else 0
    names_of_devices = sorted({event.device for event in trace.device_events})
    for device in names_of_devices:
        window = window_of(trace, device, steps, names, like)
        part, events = window.trace, window.trace.device_events
        phases = Phases(part, names)
        (analysis,) = analyze(part, names, phases)
        analysis = replace(analysis, steps=step_spans(window))
        like = like or window.numbers
        comm = [event for event in events if names.kind_of(event) == "comm"]
        exposed = spans_of(analysis.account, TRANSFER, WAITING)
        start = min(event.start for event in events)
        job = trace.rank, trace.world_size, trace.groups
        transfers = RankTransfers(comm, start, trace.base_us, trace.host, *job, exposed)
        lanes = device_lanes(part, device, names) if pictures else None
        if examined is not None:
            rank = f"{path.name}, {analysis.name}" if trace.rank is None else f"rank {trace.rank}"
            examined.append(examine(part, device, names.kind_of, rank))
        said = remarks(trace), damage(trace), window.left_out
        devices.append(TracedDevice(path, truncated, trace.rank, analysis, lanes, transfers, *said))
    return devices
