"""What to tell a user about damage in a trace."""

import re
from pathlib import Path

from ....messages import plural
from ..trace import Trace, TraceError

_LAUNCH = re.compile(r"Launch|Memcpy|Memset|enqueue|runFunction", re.IGNORECASE)


def remarks(trace: Trace) -> tuple[str, ...]:
    """Sentences about events that were skipped or repaired, and about the file."""
    found = list(trace.notes)
    if trace.truncated:
        found.append(f"the file is cut off: only the first {trace.num_events:,} events are analyzed")
    for what, number in (("skipped", trace.skipped), ("repaired", trace.repaired)):
        found += [f"{plural(number, 'damaged event')} {what}"] * (number > 0)
    return tuple(found)


def refuse_launches_alone(path: Path, trace: Trace) -> None:
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
