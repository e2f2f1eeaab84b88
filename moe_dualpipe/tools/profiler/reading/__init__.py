"""Read the traces of profilers: Chrome traces of torch.profiler, and exports of Nsight Systems.

A file can hold several ranks: an export of several processes, or traces that a tool has merged, with the rank before
each process, such as "[TP01] 4711". Each rank becomes a Trace, because devices, launches and annotations of different
ranks have the same numbers and names.
"""

import glob
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from copy import deepcopy
from pathlib import Path

from ....messages import natural_order
from ..trace import Trace, TraceError
from .chrome import WRITTEN_BY, ChromeTrace, Event, contents, read_chrome
from .kineto import sort_events
from .nsys import is_sqlite, read_nsys

__all__ = ["read_trace", "read_traces", "trace_paths"]

_PROCESS = re.compile(r"(.*\D)\d+")
_SUFFIXES = (".json", ".json.gz", ".sqlite")
_START = 1 << 20  # bytes in which the list of events begins
_EVENTS = re.compile(rb'\s*\[|.*?"traceEvents"', re.DOTALL)
_OWN = WRITTEN_BY["writtenBy"].encode()


def read_trace(path: str | Path) -> Trace:
    """Read the trace of one rank. Raises TraceError as `read_traces` does, and if the file holds several ranks."""
    traces = read_traces(path)
    if len(traces) > 1:
        labels = ", ".join(trace.label for trace in traces[:4])
        raise TraceError(f"{path}: holds the traces of {len(traces)} ranks ({labels}): use read_traces")
    return traces[0]


def read_traces(path: str | Path) -> list[Trace]:
    """Read a trace file, one Trace for each rank in it; its contents tell the format.

    Raises TraceError if it is missing, empty or not a trace.
    """
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
    traces = _sorted_by_rank(file, trace, numbered=not from_nsys)
    if from_nsys and not any(one.device_events for one in traces):
        raise TraceError(f"{path}: Nsight Systems recorded no work on a GPU: run it with --trace=cuda,nvtx")
    if not any(one.num_events for one in traces):
        why = "it is cut off before the first event" if trace.truncated else "nothing was recorded"
        raise TraceError(f"{path}: a trace without events: {why}")
    return traces


def _sorted_by_rank(file: ChromeTrace, trace: Trace, numbered: bool) -> list[Trace]:
    """The traces of the ranks that have work.

    trace: what is known of the file's damage. numbered: whether the number in a label is that of the rank.
    """
    by_rank: dict[str, list[Event]] = defaultdict(list)
    for event in file.traceEvents:
        found = _PROCESS.fullmatch(event.pid) if isinstance(event.pid, str) else None
        by_rank[found[1].strip(" ,:_-") if found else ""].append(event)
    if len(by_rank) < 2:
        sort_events(file, trace)
        return [trace]
    traces = []
    for label, file.traceEvents in by_rank.items():
        traces.append(one := deepcopy(trace))
        sort_events(file, one)
        numbers = re.findall(r"\d+", label) if numbered else []
        one.label, one.rank = label, int(numbers[0]) if len(numbers) == 1 else None  # [TP01-EP03] tells no global rank
        one.world_size = None if one.rank is None else one.world_size
    working = [one for one in traces if one.device_events] or [one for one in traces if one.operators or one.transfers]
    return working or traces


def trace_paths(arguments: Sequence[Path]) -> list[Path]:
    """Replace folders and patterns by their traces, sorted by name. Files keep their places; each appears once.

    A folder without traces stands for the traces in its folders. Raises TraceError if there are none.
    """
    return list(dict.fromkeys(path for argument in arguments for path in _expanded(argument)))


def _expanded(argument: Path) -> list[Path]:
    if argument.is_dir():
        found, where = _traces(argument.iterdir()) or _traces(argument.glob("*/*")), "in this folder"
    elif not argument.exists() and glob.has_magic(str(argument)):
        found, where = _traces(map(Path, glob.glob(str(argument)))), "matches this pattern"
    else:
        return [argument]
    if not found:
        raise TraceError(f"{argument}: no trace {where}: traces are {', '.join(_SUFFIXES)} files")
    return found


def _traces(paths: Iterable[Path]) -> list[Path]:
    """The traces among `paths`, sorted by name, in which a number counts as one; hidden files are left out."""
    files = [path for path in paths if path.name.lower().endswith(_SUFFIXES) and path.is_file()]
    visible = [path for path in files if not path.name.startswith(".")]  # macOS: "._rank0.json"
    return sorted(filter(_is_trace, visible), key=lambda path: natural_order(str(path)))


def _is_trace(path: Path) -> bool:
    """Whether a file is a trace, and no report or file for Perfetto. The reader refuses a file that cannot be read."""
    if path.suffix.lower() == ".sqlite":
        return True
    try:
        start = contents(path, [], _START)
    except OSError:
        return True
    return (len(start) >= _START or _EVENTS.match(start) is not None) and _OWN not in start[:200]
