"""Read the traces of profilers into a Trace: Chrome traces of torch.profiler, and exports of Nsight Systems."""

from pathlib import Path
from statistics import median_low
from typing import TypeVar

from ..trace import DeviceEvent, HostEvent, Trace, TraceError
from .chrome import WRITTEN_BY, read_chrome
from .kineto import sort_events
from .nsys import is_sqlite, read_nsys

__all__ = ["read_trace"]

OUTLIER = "far from all others in time"
_HOUR_US = 3.6e9
_Event = TypeVar("_Event", DeviceEvent, HostEvent)


def read_trace(path: str | Path) -> Trace:
    """Read a trace file; its contents tell the format. Raises TraceError if it is missing, empty or not a trace."""
    path = Path(path)
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path}: a report of Nsight Systems: export it with `nsys export --type sqlite`")
    if path.name.endswith((".tar", ".tar.gz", ".tgz", ".zip")):
        raise TraceError(f"{path}: an archive: unpack it, and name the traces in it")
    try:
        return read_nsys(path) if is_sqlite(path) else _read_kineto(path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise TraceError(f"{path}: not a trace: its lists are nested too deeply") from None


def _read_kineto(path: Path) -> Trace:
    trace = Trace()
    file = read_chrome(path, trace)
    if file.otherData == WRITTEN_BY:
        raise TraceError(f"{path}: written by --out for ui.perfetto.dev: name the recordings that it shows")
    sort_events(file, trace)
    if not trace.num_events:
        why = "it is cut off before the first event" if trace.truncated else "nothing was recorded"
        raise TraceError(f"{path}: a trace without events: {why}")
    trace.device_events = _without_outliers(trace.device_events, trace)
    trace.operators = _without_outliers(trace.operators, trace)
    return trace


def _without_outliers(events: list[_Event], trace: Trace) -> list[_Event]:
    """Leave out at most 1% of the events, more than an hour from all others: one clock error makes weeks of seconds."""
    middle = median_low(event.start for event in events) if events else 0.0
    near = [event for event in events if event.start > middle - _HOUR_US and event.end < middle + _HOUR_US]
    gone, most = len(events) - len(near), max(len(events) // 100, len(events) >= 10)
    if not 0 < gone <= most:
        return events
    trace.skipped[OUTLIER] += gone
    return near
