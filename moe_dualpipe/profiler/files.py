"""Analyze the trace files of one measurement together: one file per rank, with one or more devices each."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..messages import plural, printable
from .analyze import COMMUNICATION, Analysis, analyze, kind_of
from .host import host_as_device
from .intervals import Intervals, intervals_of, union
from .ranks import RankSkew, RankTransfers, rank_skews
from .trace import DeviceEvent, HostEvent, Trace, TraceError, read_trace

LANES = ("computation", "communication")


class LaneBlock(NamedTuple):
    """The work on one lane that one annotation launched."""

    lane: int
    """Index in LANES."""
    name: str
    """Name of the annotation; "" for all work launched outside annotations."""
    intervals: Intervals
    """In microseconds, from the start of the device's first event."""


@dataclass(frozen=True)
class TracedDevice:
    """One device of one trace."""

    path: Path
    truncated: int
    """Number of events read from an incomplete file; 0 for a complete file."""
    rank: int | None
    analysis: Analysis
    blocks: Sequence[LaneBlock]
    transfers: RankTransfers


@dataclass(frozen=True)
class TraceFiles:
    """The devices of all files, and the skew of each device."""

    devices: Sequence[TracedDevice]
    skews: Sequence[RankSkew]

    @property
    def names(self) -> list[str]:
        """Short, distinct names: the ranks if all devices have different ones, otherwise file and device."""
        numbers = [device.rank for device in self.devices]
        by_rank = None not in numbers and len(set(numbers)) == len(numbers)
        names = [f"rank {d.rank}" if by_rank else f"{printable(d.path)}, {d.analysis.name}" for d in self.devices]
        return names if len(set(names)) == len(names) else [f"{i}: {name}" for i, name in enumerate(names)]

    @property
    def truncated(self) -> dict[Path, int]:
        """The incomplete files, with the number of events read from each."""
        return {device.path: device.truncated for device in self.devices if device.truncated}

    def as_objects(self) -> list[dict[str, Any]]:
        """A JSON object for each device."""
        return [
            {
                "trace": str(device.path), "truncated": bool(device.truncated), "rank": device.rank,
                "waited_us": skew.waited_us, "shift_us": skew.shift_us, **device.analysis.as_object(),
            }
            for device, skew in zip(self.devices, self.skews, strict=True)
        ]  # fmt: skip


def analyze_files(paths: Sequence[Path], pattern: re.Pattern[str] = COMMUNICATION, pictures: bool = True) -> TraceFiles:
    """Read and analyze trace files. Raises TraceError for a file that is not a trace or has no device events.

    pictures: also collect the lane blocks, which pictures need.
    """
    devices = [device for path in paths for device in analyze_devices(path, read_trace(path), pattern, pictures)]
    return TraceFiles(devices, rank_skews([device.transfers for device in devices]))


def analyze_devices(
    path: Path, trace: Trace, pattern: re.Pattern[str] = COMMUNICATION, pictures: bool = True
) -> list[TracedDevice]:
    """Analyze the devices of a trace that was read from `path`. Raises TraceError if it has no device events."""
    trace = host_as_device(trace, pattern)
    if not trace.device_events:
        raise TraceError(
            f"{path}: there is no kernel on a device, and no operator on a CPU, in {plural(trace.num_events, 'event')}"
        )
    devices = []
    for analysis in analyze(trace, pattern):
        events = [event for event in trace.device_events if event.device == analysis.device]
        comm = [event for event in events if kind_of(event, pattern) == "comm"]
        transfers = RankTransfers(comm, min(event.start for event in events), trace.base_us, trace.host)
        blocks = lane_blocks(trace, analysis.device, pattern) if pictures else ()
        truncated = trace.num_events if trace.truncated else 0
        devices.append(TracedDevice(path, truncated, trace.rank, analysis, blocks, transfers))
    return devices


def lane_blocks(trace: Trace, device: str, pattern: re.Pattern[str] = COMMUNICATION) -> list[LaneBlock]:
    """Return the blocks of `device`, sorted by lane and start."""
    trace = host_as_device(trace, pattern)
    grouped: dict[tuple[int, HostEvent | None], list[DeviceEvent]] = defaultdict(list)
    for event in trace.device_events:
        if event.device == device:
            lane = int(kind_of(event, pattern) == "comm")
            grouped[lane, trace.annotation_of(event)].append(event)
    start = min((event.start for events in grouped.values() for event in events), default=0.0)
    blocks = []
    for (lane, annotation), events in grouped.items():
        if len(intervals := union(intervals_of(events))):
            blocks.append(LaneBlock(lane, annotation.name if annotation else "", intervals - start))
    return sorted(blocks, key=lambda block: (block.lane, *block.intervals[0]))
