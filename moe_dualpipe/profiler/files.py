"""The files of one measurement: each analyzed, several compared, one report and one picture of all."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .analyze import COMMUNICATION, Analysis, analyze, kind_of
from .blocks import LaneBlock, lane_blocks
from .chrome import Trace, TraceError, read
from .host import on_cpu
from .ranks import Rank, Together, together


@dataclass(frozen=True)
class Device:
    """One device of one trace."""

    path: Path
    truncated: int
    """How many events there were before the end of a file that was cut off; 0 for a whole one."""
    rank_number: int | None
    analysis: Analysis
    blocks: Sequence[LaneBlock]
    rank: Rank


@dataclass(frozen=True)
class Files:
    """What was found in all of them; `joint` has an entry for each device."""

    devices: Sequence[Device]
    joint: Sequence[Together]

    @property
    def names(self) -> list[str]:
        """Short and different: by rank if the files say so, else by file, and by device where one has several."""
        numbers = [device.rank_number for device in self.devices]
        by_rank = None not in numbers and len(set(numbers)) == len(numbers)
        names = [f"rank {d.rank_number}" if by_rank else f"{d.path}, {d.analysis.name}" for d in self.devices]
        return names if len(set(names)) == len(names) else [f"{i}: {name}" for i, name in enumerate(names)]

    @property
    def truncated(self) -> dict[Path, int]:
        """Files that were cut off, and how many events were there before that."""
        return {device.path: device.truncated for device in self.devices if device.truncated}

    def as_objects(self) -> list[dict[str, Any]]:
        """For `json`: one for each device."""
        return [
            {
                "trace": str(device.path), "truncated": bool(device.truncated), "rank": device.rank_number,
                "waited_us": other.waited_us, "shift_us": other.shift_us, **device.analysis.as_object(),
            }
            for device, other in zip(self.devices, self.joint, strict=True)
        ]  # fmt: skip


def analyze_files(paths: Sequence[Path], pattern: re.Pattern[str] = COMMUNICATION, pictures: bool = True) -> Files:
    """Read and analyze them, one after another. Raises TraceError for a file that is none, or has no work in it."""
    devices = [device for path in paths for device in devices_of(path, read(path), pattern, pictures)]
    return Files(devices, together([device.rank for device in devices]))


def devices_of(
    path: Path, trace: Trace, pattern: re.Pattern[str] = COMMUNICATION, pictures: bool = True
) -> list[Device]:
    """The devices of a trace that was read from `path`. Raises TraceError where there is no work on any."""
    trace = on_cpu(trace, pattern)
    if not trace.work:
        raise TraceError(
            f"{path}: no work among {trace.num_events:,} events: neither kernels on a device nor operators on a CPU"
        )
    devices = []
    for analysis in analyze(trace, pattern):
        works = [work for work in trace.work if work.device == analysis.device]
        transfers = [work for work in works if kind_of(work, pattern) == "comm"]
        rank = Rank(transfers, min(work.start for work in works), trace.base_us, trace.host)
        blocks = lane_blocks(trace, analysis.device, pattern) if pictures else ()
        truncated = trace.num_events if trace.truncated else 0
        devices.append(Device(path, truncated, trace.rank, analysis, blocks, rank))
    return devices
