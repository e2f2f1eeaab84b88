"""What to tell a user about damage in a trace."""

import re
from collections import Counter
from pathlib import Path

from ....messages import plural
from ..trace import Trace, TraceError

_LAUNCH = re.compile(r"Launch|Memcpy|Memset|enqueue|runFunction", re.IGNORECASE)


def remarks(trace: Trace) -> tuple[str, ...]:
    """Sentences about events that were skipped or repaired, and about the file."""
    found = list(trace.notes)
    if trace.skipped:
        found.append(f"{plural(trace.skipped.total(), 'damaged event')} skipped ({_reasons(trace.skipped)})")
    if trace.repaired:
        found.append(f"{plural(trace.repaired.total(), 'damaged event')} repaired ({_reasons(trace.repaired)})")
    return tuple(found)


def damage(trace: Trace) -> dict[str, dict[str, int] | list[str]]:
    """Numbers of events that were skipped or repaired, by reason, and what else is wrong with the file."""
    return {"skipped": dict(trace.skipped), "repaired": dict(trace.repaired), "notes": list(trace.notes)}


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


def _reasons(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.most_common())
