"""The files of one measurement: each analyzed, several compared, one report and one picture of all."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .analyze import COMMUNICATION, Analysis, analyze, kind_of
from .blocks import LaneBlock, lane_blocks
from .host import host_as_device
from .ranks import RankSkew, RankTransfers, rank_skews
from .trace import Trace, TraceError, read_trace


@dataclass(frozen=True)
class TracedDevice:
    """One device of one trace."""

    path: Path
    truncated: int
    """How many events there were before the end of a file that was cut off; 0 for a whole one."""
    rank: int | None
    analysis: Analysis
    blocks: Sequence[LaneBlock]
    transfers: RankTransfers


@dataclass(frozen=True)
class TraceFiles:
    """What was found in all of them; `joint` has an entry for each device."""

    devices: Sequence[TracedDevice]
    skews: Sequence[RankSkew]

    @property
    def names(self) -> list[str]:
        """Short and different: by rank if the files say so, else by file, and by device where one has several."""
        numbers = [device.rank for device in self.devices]
        by_rank = None not in numbers and len(set(numbers)) == len(numbers)
        names = [f"rank {d.rank}" if by_rank else f"{d.path}, {d.analysis.name}" for d in self.devices]
        return names if len(set(names)) == len(names) else [f"{i}: {name}" for i, name in enumerate(names)]

    @property
    def truncated(self) -> dict[Path, int]:
        """Files that were cut off, and how many events were there before that."""
        return {device.path: device.truncated for device in self.devices if device.truncated}

    def as_objects(self) -> list[dict[str, Any]]:
        """For `json`: one for each device."""
        return [
            {
                "trace": str(device.path), "truncated": bool(device.truncated), "rank": device.rank,
                "waited_us": other.waited_us, "shift_us": other.shift_us, **device.analysis.as_object(),
            }
            for device, other in zip(self.devices, self.skews, strict=True)
        ]  # fmt: skip


def analyze_files(paths: Sequence[Path], pattern: re.Pattern[str] = COMMUNICATION, pictures: bool = True) -> TraceFiles:
    """Read and analyze them, one after another. Raises TraceError for a file that is none, or has no work in it."""
    devices = [device for path in paths for device in analyze_devices(path, read_trace(path), pattern, pictures)]
    return TraceFiles(devices, rank_skews([device.transfers for device in devices]))


def analyze_devices(
    path: Path, trace: Trace, pattern: re.Pattern[str] = COMMUNICATION, pictures: bool = True
) -> list[TracedDevice]:
    """The devices of a trace that was read_trace from `path`. Raises TraceError where there is no work on any."""
    trace = host_as_device(trace, pattern)
    if not trace.device_events:
        raise TraceError(
            f"{path}: no work among {trace.num_events:,} events: neither kernels on a device nor operators on a CPU"
        )
    devices = []
    for analysis in analyze(trace, pattern):
        works = [work for work in trace.device_events if work.device == analysis.device]
        transfers = [work for work in works if kind_of(work, pattern) == "comm"]
        rank = RankTransfers(transfers, min(work.start for work in works), trace.base_us, trace.host)
        blocks = lane_blocks(trace, analysis.device, pattern) if pictures else ()
        truncated = trace.num_events if trace.truncated else 0
        devices.append(TracedDevice(path, truncated, trace.rank, analysis, blocks, rank))
    return devices
