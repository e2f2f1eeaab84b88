"""The lanes of a device: what computed and what communicated, and which annotation launched it."""

import re
from collections import defaultdict
from typing import NamedTuple

from .analyze import COMMUNICATION, intervals_of, kind_of
from .host import host_as_device
from .intervals import Intervals, union
from .trace import DeviceEvent, HostEvent, Trace

LANES = ("computation", "communication")


class LaneBlock(NamedTuple):
    """The work on one lane that one annotation launched."""

    lane: int
    """Index in LANES."""
    name: str
    """Of the annotation; "" for work that was launched outside of annotations."""
    intervals: Intervals
    """Microseconds from the start of the device's first work."""


def lane_blocks(trace: Trace, device: str, pattern: re.Pattern[str] = COMMUNICATION) -> list[LaneBlock]:
    """The blocks of `device`, ordered by lane and start time."""
    trace = host_as_device(trace, pattern)
    works: dict[tuple[int, HostEvent | None], list[DeviceEvent]] = defaultdict(list)
    for work in trace.device_events:
        if work.device == device:
            lane = int(kind_of(work, pattern) == "comm")
            works[lane, trace.annotation_of(work)].append(work)
    start = min((work.start for same in works.values() for work in same), default=0.0)
    found = [
        LaneBlock(lane, mark.name if mark else "", union(intervals_of(same)) - start)
        for (lane, mark), same in works.items()
    ]
    return sorted(
        (block for block in found if len(block.intervals)), key=lambda block: (block.lane, *block.intervals[0])
    )
