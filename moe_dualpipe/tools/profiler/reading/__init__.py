"""Read the traces of profilers into a Trace: Chrome traces of torch.profiler, and exports of Nsight Systems."""

from pathlib import Path

from ..trace import Trace, TraceError
from .chrome import WRITTEN_BY, read_chrome
from .kineto import sort_events
from .nsys import is_sqlite, read_nsys

__all__ = ["read_trace"]


def read_trace(path: str | Path) -> Trace:
    """Read a trace file; its contents tell the format. Raises TraceError if it is missing, empty or not a trace."""
    path = Path(path)
    if path.suffix in (".nsys-rep", ".qdrep"):
        raise TraceError(f"{path}: a report of Nsight Systems: export it with `nsys export --type sqlite`")
    if path.name.endswith((".tar", ".tar.gz", ".tgz", ".zip")):
        raise TraceError(f"{path}: an archive: unpack it, and name the traces in it")
    trace = Trace()
    try:
        from_nsys = is_sqlite(path)
        file = read_nsys(path, trace) if from_nsys else read_chrome(path, trace)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except RecursionError:
        raise TraceError(f"{path}: not a trace: its lists are nested too deeply") from None
    if file.otherData == WRITTEN_BY:
        raise TraceError(f"{path}: written by --out for ui.perfetto.dev: name the recordings that it shows")
    sort_events(file, trace)
    if from_nsys and not trace.device_events:
        raise TraceError(f"{path}: Nsight Systems recorded no work on a GPU: run it with --trace=cuda,nvtx")
    if not trace.num_events:
        why = "it is cut off before the first event" if trace.truncated else "nothing was recorded"
        raise TraceError(f"{path}: a trace without events: {why}")
    return trace
