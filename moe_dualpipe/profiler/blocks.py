"""Divide the computation and the communication of a device into blocks, by the annotation that launched the work."""

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
    """The annotation; "" for all work that was launched outside of annotations."""
    intervals: Intervals
    """In microseconds, from the start of the device's first event."""


def lane_blocks(trace: Trace, device: str, pattern: re.Pattern[str] = COMMUNICATION) -> list[LaneBlock]:
    """Return the blocks of `device`, sorted by lane and start."""
    trace = host_as_device(trace, pattern)
    grouped: dict[tuple[int, HostEvent | None], list[DeviceEvent]] = defaultdict(list)
    for event in trace.device_events:
        if event.device == device:
            lane = int(kind_of(event, pattern) == "comm")
            grouped[lane, trace.annotation_of(event)].append(event)
    start = min((event.start for events in grouped.values() for event in events), default=0.0)
    blocks = [
        LaneBlock(lane, annotation.name if annotation else "", union(intervals_of(events)) - start)
        for (lane, annotation), events in grouped.items()
    ]
    return sorted(
        (block for block in blocks if len(block.intervals)), key=lambda block: (block.lane, *block.intervals[0])
    )
