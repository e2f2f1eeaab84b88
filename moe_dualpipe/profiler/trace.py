"""Read the Chrome traces of torch.profiler: the events on devices, their launches, and the annotations around these.

Traces are large and often incomplete. So events are decoded one by one from the stream, only the fields that the
analysis needs are kept, and of an incomplete file all complete events are read.
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

from ..messages import quoted
from ..overlap.labels import OWN_TRANSFERS

TRANSFER = re.compile(rf"(nccl|gloo|ucc|mpi|xccl|{OWN_TRANSFERS}):(?!:)")
"""Names of events for whole transfers, by torch's backends and this package. They are not annotations."""
_OWN_CALLS = re.compile(f"{OWN_TRANSFERS}::")

_SPACE = re.compile(r"[\s,]*")
_OPENING = re.compile(r'"traceEvents"\s*:\s*\[')
_CHUNK = 1 << 20
_LONGEST_EVENT = 1 << 24
MOST_EVENTS = 4_000_000
"""Later events are not read. So many events need 2 to 3 GB."""
_LONGEST_HEADER = 1 << 22
_LONGEST_TIME = 1e17  # microseconds: 3,000 years


class TraceError(ValueError):
    """The file is not a usable trace. The message is one line that names the file."""


class DeviceEvent(NamedTuple):
    """A kernel, copy or fill on a device; on a CPU, a piece of an operator or a transfer. Times in microseconds."""

    name: str
    category: str
    """The category in the file, in lower case; on a CPU, "operator" or "transfer"."""
    start: float
    end: float
    device: str
    stream: str
    correlation: int | None
    blocks: int
    """Thread blocks of the launch grid; 0 if unknown."""


class HostEvent(NamedTuple):
    """An annotation, operator, transfer or launch on a thread of the host. Times in microseconds."""

    name: str
    start: float
    end: float
    thread: tuple[str, str]


@dataclass
class Trace:
    """The contents of one file."""

    device_events: list[DeviceEvent] = field(default_factory=list)
    launches: dict[int, HostEvent] = field(default_factory=dict)
    """Launches of device events, by correlation id."""
    annotations: list[HostEvent] = field(default_factory=list)
    operators: list[HostEvent] = field(default_factory=list)
    """Nested operators of the host."""
    transfers: list[HostEvent] = field(default_factory=list)
    """Transfers as recorded by a backend on the host."""
    waits: list[HostEvent] = field(default_factory=list)
    """Waits of a CPU that acts as the device (see host.py)."""
    num_events: int = 0
    truncated: bool = False
    """The file is incomplete or too long: there are events that were not read."""
    rank: int | None = None
    host: str = ""
    base_us: float = 0.0
    """The origin of the file's times, on the clock of the host."""
    num_sms: int = 0
    """SMs of the first GPU in the file; 0 if unknown."""

    def annotation_of(self, event: DeviceEvent) -> HostEvent | None:
        """The innermost annotation around the launch of `event`, if both are in the trace."""
        return None if event.correlation is None else self._annotations_of_launches.get(event.correlation)

    @cached_property
    def _annotations_of_launches(self) -> dict[int, HostEvent]:
        return self.innermost_around(self.annotations)

    def innermost_around(self, events: Sequence[HostEvent]) -> dict[int, HostEvent]:
        """Return the innermost of `events` around each launch, by correlation id.

        An event of the launching thread comes first, then one of any thread: autograd's thread has no annotations, and
        the thread that called it waits inside one.
        """
        threads: dict[tuple[str, str], list[HostEvent]] = defaultdict(list)
        for event in events:
            threads[event.thread].append(event)
        launches: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
        for correlation, launch in self.launches.items():
            launches[launch.thread].append((launch.start, correlation))
        found: dict[int, HostEvent] = {}
        for thread in threads:
            found |= _innermost(threads[thread], launches[thread])
        others = [launch for starts in launches.values() for launch in starts if launch[1] not in found]
        return found | _innermost(events, others)


def _innermost(events: Iterable[HostEvent], launches: Iterable[tuple[float, int]]) -> dict[int, HostEvent]:
    """Return, of the events around each launch, the one that started last. A launch is a time and a correlation id."""
    later = deque(sorted(events, key=lambda event: (event.start, -event.end)))
    around: list[HostEvent] = []
    found: dict[int, HostEvent] = {}
    for time, correlation in sorted(launches):
        while later and later[0].start <= time:
            around.append(later.popleft())
        around = [event for event in around if event.end > time]
        if around:
            found[correlation] = around[-1]
    return found


_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "memcpy", "memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver", "runtime", "hip_runtime"}
_HOST = {"user_annotation", "cpu_op"}


def read_trace(path: str | Path) -> Trace:
    """Read a .json or .json.gz file. Raises TraceError if it is missing, empty or not a trace."""
    path, trace = Path(path), Trace()
    try:
        for event in _events(_pieces(path), path, trace):
            _keep(event, trace)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, zlib.error):
        raise TraceError(f"{path}: not a trace: neither text nor gzip") from None
    except RecursionError:
        raise TraceError(f"{path}: not a trace: its lists are nested too deeply") from None
    if not trace.num_events:
        raise TraceError(f"{path}: {'cut off before the first event' if trace.truncated else 'a trace without events'}")
    return trace


def _keep(event: dict[str, Any], trace: Trace) -> None:
    if event.get("ph") != "X":
        return
    # interned, so that there is one string per name and not one per event
    category, name = sys.intern(str(event.get("cat", "")).lower()), sys.intern(str(event.get("name", "")))
    if category not in _HOST and category not in _DEVICE and category not in _LAUNCHES:
        return  # such as python_function, of which there are many
    arguments = event.get("args")
    arguments = arguments if isinstance(arguments, dict) else {}
    try:
        start = float(event["ts"])
        end = start + max(float(event.get("dur", 0)), 0.0)
    except (KeyError, TypeError, ValueError, OverflowError):
        return
    if not (abs(start) < _LONGEST_TIME and end < _LONGEST_TIME):
        return
    thread = sys.intern(str(event.get("pid"))), sys.intern(str(event.get("tid")))
    correlation = arguments.get("correlation")
    correlation = correlation if type(correlation) is int else None
    if category in _DEVICE:
        grid = arguments.get("grid")
        blocks = math.prod(map(_number, grid)) if isinstance(grid, list) and len(grid) <= 3 else 0
        device, stream = str(arguments.get("device", thread[0])), str(arguments.get("stream", thread[1]))
        trace.device_events.append(DeviceEvent(name, category, start, end, device, stream, correlation, blocks))
    elif category in _LAUNCHES and correlation is not None:
        trace.launches[correlation] = HostEvent(name, start, end, thread)
    elif category in _HOST:
        host_event = HostEvent(name, start, end, thread)
        if TRANSFER.match(name):
            trace.transfers.append(host_event)
        elif category == "cpu_op" or _OWN_CALLS.match(name):
            trace.operators.append(host_event)
        else:
            trace.annotations.append(host_event)


def _number(value: object) -> int:
    """A count in a trace; 0 if it is not valid."""
    return value if type(value) is int and 0 <= value < 2**32 else 0


def _pieces(path: Path) -> Iterator[str]:
    """Yield the text of the file in pieces, also of an incomplete compressed file."""
    decode = codecs.getincrementaldecoder("utf-8")().decode
    with path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        expand = zlib.decompressobj(wbits=31).decompress if compressed else bytes
        while chunk := file.read(_CHUNK):
            if text := decode(expand(chunk)):
                yield text


def _events(pieces: Iterator[str], path: Path, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield the objects of the list "traceEvents", or of a file that is a list. Sets `trace.truncated`."""
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
        except ValueError:
            what = f"a number with too many digits in event {trace.num_events}"
            raise TraceError(f"{path}: not a trace: {what}") from None
        if not isinstance(event, dict):
            raise TraceError(f"{path}: not a trace: event {trace.num_events} is {quoted(event, 40)}, not an object")
        if trace.num_events == MOST_EVENTS:
            trace.truncated = True
            return
        trace.num_events += 1
        yield event


def _opened(pieces: Iterator[str], path: Path) -> tuple[str, str]:
    """Return the text before the list of events ("" if it is too long), and the text after its opening bracket."""
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
    """Read the rank, the clock and the GPU from the text before the events."""
    try:
        found = json.loads(header + '"traceEvents": []}')
    except (ValueError, RecursionError):
        return
    job, gpus = found.get("distributedInfo"), found.get("deviceProperties")
    if isinstance(job, dict) and type(rank := job.get("rank")) is int and 0 <= rank < 2**31:
        trace.rank = rank
    if isinstance(gpus, list) and gpus and isinstance(gpus[0], dict):
        trace.num_sms = _number(gpus[0].get("numSms"))
    trace.host = str(found.get("host_name", ""))
    if type(base := found.get("baseTimeNanoseconds")) is int and abs(base) < 2**63:
        trace.base_us = base / 1e3
