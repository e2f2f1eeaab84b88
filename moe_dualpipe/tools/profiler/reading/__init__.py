"""Read the traces of profilers into a Trace: Chrome traces of torch.profiler, and exports of Nsight Systems."""

import zlib
from pathlib import Path

from ..trace import Trace, TraceError
from .chrome import MOST_EVENTS, WANTED, ChromeEvents
from .header import describe
from .kineto import KinetoEvents
from .nsys import read_nsys
from .nsys_tables import is_sqlite
from .outliers import leave_out_outliers
from .pieces import text_pieces

__all__ = ["read_trace"]


def read_trace(path: str | Path) -> Trace:
    """Read a trace file; its contents tell the format. Raises TraceError if it is missing, empty or not a trace."""
    path = Path(path)
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path}: a report of Nsight Systems: export it with `nsys export --type sqlite`")
    if path.name.endswith((".tar", ".tar.gz", ".tgz", ".zip")):
        raise TraceError(f"{path}: an archive: unpack it, and name the traces in it")
    try:
        return read_nsys(path, MOST_EVENTS) if is_sqlite(path) else _read_chrome(path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except zlib.error:
        raise TraceError(f"{path}: not a trace: neither text nor gzip: {WANTED}") from None
    except RecursionError:
        raise TraceError(f"{path}: not a trace: its lists are nested too deeply") from None


def _read_chrome(path: Path) -> Trace:
    trace = Trace()
    events = ChromeEvents(text_pieces(path, trace.notes), path, trace)
    kept = KinetoEvents(trace)
    for event in events:
        kept.add(event)
    describe(events.outside, trace)
    kept.finish()
    leave_out_outliers(trace)
    if not trace.num_events:
        why = "it is cut off before the first event" if trace.truncated else "nothing was recorded"
        raise TraceError(f"{path}: a trace without events: {why}")
    return trace
