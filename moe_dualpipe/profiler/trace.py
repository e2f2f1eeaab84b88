"""Read the Chrome trace that torch.profiler writes: what ran on the device, who launched it, and in which annotation.

The files are large and often cut off. So events are decoded one after the other from the stream, only what the analysis
needs is kept, in a few words each, and what was read before the end of a truncated file is a result.

Where nothing was recorded on a device, the host is the device: host.py makes work of its operators and transfers.
"""

import codecs
import json
import math
import re
import sys
import zlib
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from ..overlap.labels import LINK

TRANSFER = re.compile(rf"(nccl|gloo|ucc|mpi|xccl|{LINK}):(?!:)")
"""How torch's backends, and modelled links, name a transfer from its start to its end. It is no scope of other work."""

_SPACE = re.compile(r"[\s,]*")
_OPENING = re.compile(r'"traceEvents"\s*:\s*\[')
_CHUNK = 1 << 20
_LONGEST_EVENT = 1 << 24
MOST_EVENTS = 4_000_000
"""More are not read: they would need more than 2 to 3 GB."""
_LONGEST_HEADER = 1 << 22


class TraceError(ValueError):
    """The file holds no trace; the message is one line and names it."""


class DeviceEvent(NamedTuple):
    """A kernel, copy or fill on a device; or of a CPU, a piece of an operator or a transfer. Times in microseconds."""

    name: str
    category: str
    """As in the file, in lower case; or "operator" or "transfer"."""
    start: float
    end: float
    device: str
    stream: str
    correlation: int | None
    blocks: int
    """Of its launch grid; 0 where the trace does not say."""


class HostEvent(NamedTuple):
    """An annotation, operator, transfer, or the launch of some work, on a thread of the host. Times in microseconds."""

    name: str
    start: float
    end: float
    thread: tuple[str, str]


@dataclass
class Trace:
    """What one file says."""

    device_events: list[DeviceEvent] = field(default_factory=list)
    launches: dict[int, HostEvent] = field(default_factory=dict)
    """By correlation id."""
    annotations: list[HostEvent] = field(default_factory=list)
    operators: list[HostEvent] = field(default_factory=list)
    """Of the host, nested in each other."""
    transfers: list[HostEvent] = field(default_factory=list)
    """What a backend says was on its way."""
    waits: list[HostEvent] = field(default_factory=list)
    """Where a CPU, as a device, waited."""
    num_events: int = 0
    truncated: bool = False
    """There is more, which could not be read or was too much."""
    rank: int | None = None
    host: str = ""
    base_us: float = 0.0
    """What all times of the file are counted from, on the clock of the host."""
    num_sms: int = 0
    """Of the first GPU that the file describes; 0 where it describes none."""

    def annotation_of(self, work: DeviceEvent) -> HostEvent | None:
        """The innermost annotation around the launch of `work`, if the trace says both."""
        return None if work.correlation is None else self._annotations_of_launches.get(work.correlation)

    @cached_property
    def _annotations_of_launches(self) -> dict[int, HostEvent]:
        return self.innermost_around(self.annotations)

    def innermost_around(self, marks: Sequence[HostEvent]) -> dict[int, HostEvent]:
        """The innermost of `marks` around each launch, by correlation id.

        It is one of the launch's own thread; where there is none, of any: the thread of a backward has no annotations,
        and works while the one that called it waits inside of one.
        """
        threads: dict[tuple[str, str], list[HostEvent]] = defaultdict(list)
        for mark in marks:
            threads[mark.thread].append(mark)
        launches: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        for correlation, mark in self.launches.items():
            launches[mark.thread].append((mark.start, correlation))
        found: dict[int, HostEvent] = {}
        for thread in threads:
            found |= _innermost(threads[thread], launches[thread])
        others = [launch for starts in launches.values() for launch in starts if launch[1] not in found]
        return found | _innermost(marks, others)


def _innermost(marks: Iterable[HostEvent], launches: Iterable[tuple[float, int]]) -> dict[int, HostEvent]:
    """The mark that started last of those around each launch, which is a time and a correlation id."""
    waiting = deque(sorted(marks, key=lambda mark: (mark.start, -mark.end)))
    around: list[HostEvent] = []
    found: dict[int, HostEvent] = {}
    for time, correlation in sorted(launches):
        while waiting and waiting[0].start <= time:
            around.append(waiting.popleft())
        around = [mark for mark in around if mark.end > time]
        if around:
            found[correlation] = around[-1]
    return found


_WORK = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver", "runtime", "hip_runtime"}
_MARKS = {"user_annotation", "cpu_op"}


def read_trace(path: str | Path) -> Trace:
    """Read `path`, .json or .json.gz. Raises TraceError for a file that is missing, empty or no trace."""
    path, trace = Path(path), Trace()
    try:
        for event in _events(_pieces(path), path, trace):
            _keep(event, trace)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, zlib.error):
        raise TraceError(f"{path}: neither text nor gzip; a trace is .json or .json.gz") from None
    except RecursionError:
        raise TraceError(f"{path}: not a trace: its lists are nested too deeply") from None
    if not trace.num_events:
        raise TraceError(f"{path}: {'cut off before the first event' if trace.truncated else 'a trace without events'}")
    return trace


def _keep(event: dict[str, Any], trace: Trace) -> None:
    if event.get("ph") != "X":
        return
    # Interned: one string for each name, not one for each event.
    category, name = sys.intern(str(event.get("cat", "")).lower()), sys.intern(str(event.get("name", "")))
    if category not in _MARKS and category not in _WORK and category not in _LAUNCHES:
        return  # as the many of Python's functions
    arguments = event.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    try:
        start = float(event["ts"])
        end = start + max(float(event.get("dur", 0)), 0.0)
    except (KeyError, TypeError, ValueError):
        return
    if not math.isfinite(end):
        return
    thread = sys.intern(str(event.get("pid"))), sys.intern(str(event.get("tid")))
    correlation = arguments.get("correlation")
    correlation = correlation if isinstance(correlation, int) else None
    if category in _WORK:
        grid = arguments.get("grid")
        blocks = math.prod(grid) if isinstance(grid, list) and all(isinstance(n, int) for n in grid) else 0
        device, stream = str(arguments.get("device", thread[0])), str(arguments.get("stream", thread[1]))
        trace.device_events.append(DeviceEvent(name, category, start, end, device, stream, correlation, blocks))
    elif category in _LAUNCHES and correlation is not None:
        trace.launches[correlation] = HostEvent(name, start, end, thread)
    elif category in _MARKS:
        mark = HostEvent(name, start, end, thread)
        if TRANSFER.match(name):
            trace.transfers.append(mark)
        elif category == "cpu_op" or name.startswith(f"{LINK}::"):
            trace.operators.append(mark)
        else:
            trace.annotations.append(mark)


def _pieces(path: Path) -> Iterator[str]:
    """The text of the file, piece by piece; of a compressed one as much as there is, if it was cut off."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        expand = zlib.decompressobj(wbits=31).decompress if compressed else bytes
        while chunk := file.read(_CHUNK):
            if text := decode(expand(chunk)):
                yield text


def _events(pieces: Iterator[str], path: Path, trace: Trace) -> Iterator[dict[str, Any]]:
    """The objects in the list "traceEvents", or in a file that is a list; sets `trace.truncated`."""
    decode = json.JSONDecoder().raw_decode
    header, text = _opened(pieces, path)
    _describe(header, trace)
    at = 0
    while True:
        at = _SPACE.match(text, at).end()  # type: ignore[union-attr]
        if text.startswith("]", at):
            return
        try:
            event, at = decode(text, at)
        except json.JSONDecodeError as error:
            text, at = text[at:], 0
            if len(text) > _LONGEST_EVENT:
                raise TraceError(f"{path}: not a trace: {error.msg} in event {trace.num_events}") from None
            if not (more := next(pieces, "")):
                trace.truncated = True
                return
            text += more
            continue
        if not isinstance(event, dict):
            raise TraceError(f"{path}: not a trace: event {trace.num_events} is {str(event)[:40]!r}, not an object")
        if trace.num_events == MOST_EVENTS:
            trace.truncated = True
            return
        trace.num_events += 1
        yield event


def _opened(pieces: Iterator[str], path: Path) -> tuple[str, str]:
    """The text before the list of events, as far as it is short, and the text behind the bracket that opens it."""
    text = next(pieces, "").lstrip()
    if text.startswith("["):
        return "", text[1:]
    if not text.startswith("{"):
        what = f"it begins with {text[:20]!r}, not with an object or a list" if text else "the file is empty"
        if not text and path.stat().st_size:
            what = "it is cut off before its first event"
        raise TraceError(f"{path}: not a trace: {what}")
    header = ""
    while not (opening := _OPENING.search(text)):
        if not (more := next(pieces, "")):
            raise TraceError(f'{path}: not a trace of torch.profiler: it has no list "traceEvents"')
        header = (header + text[:-100])[:_LONGEST_HEADER]
        text = text[-100:] + more
    whole = header + text[: opening.start()] if len(header) < _LONGEST_HEADER else ""
    return whole, text[opening.end() :]


def _describe(header: str, trace: Trace) -> None:
    """Keep what the file says of the rank, its clock and its GPU, if it says so before the events."""
    try:
        found = json.loads(header + '"traceEvents": []}')
    except (json.JSONDecodeError, RecursionError):
        return
    job, gpus = found.get("distributedInfo"), found.get("deviceProperties")
    if isinstance(job, dict) and isinstance(rank := job.get("rank"), int):
        trace.rank = rank
    if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict) and isinstance(sms := gpus[0].get("numSms"), int):
        trace.num_sms = sms
    trace.host = str(found.get("host_name", ""))
    if isinstance(base := found.get("baseTimeNanoseconds"), int):
        trace.base_us = base / 1e3
