r"""The events of a Chrome trace, and the values beside them.

A trace has up to millions of events, and most of their arguments are never needed. So the whole file is decoded at once
into structs of the few fields that are read, in which arguments stay text. This needs about four times the size of the
file in memory.

Versions of PyTorch and kineto write events that are not JSON, and a killed process leaves half a file. Only if the file
cannot be decoded, its events are looked for one by one. A damaged one is repaired or skipped, and counted:

    damage                          example                   the event is
    invalid UTF-8                   "name": "\xff"            used, with a mark
    invalid arguments               "args": {"s": "\xff"}     used, with the arguments if only they have invalid UTF-8
    control characters in strings   "a<newline>b"             used, with blanks
    invalid escapes                 "C:\Users"                used, with the backslash
    inf or nan                      "bandwidth": inf          used, unless it is a time
    decimal commas                  "dur": 12,5               used, as 12.5
    anything else                   {"ph": "X", "na           skipped

Sources: pytorch/pytorch issues 130622, 136180 and 191032, pytorch/kineto issues 105 and 336.
"""

import gzip
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

from ....messages import quoted
from ..trace import Trace, TraceError

WANTED = "name a trace of torch.profiler (.json, .json.gz) or an export of Nsight Systems (.sqlite)"
WRITTEN_BY = {"writtenBy": "moe-dualpipe profile"}
"""The value of "otherData" in the files for ui.perfetto.dev. They are not recordings."""
_CHUNK = 1 << 16


class Event(Struct, gc=False):
    """One event of any kind. The types of its fields are not checked."""

    ph: Any = None
    cat: Any = None
    name: Any = ""
    ts: Any = None
    dur: Any = 0
    pid: Any = None
    tid: Any = None
    args: Raw = Raw(b"null")


class ChromeTrace(Struct):
    """The contents of a file. Values beside the events can have any type."""

    traceEvents: list[Event]
    distributedInfo: Any = None
    deviceProperties: Any = None
    baseTimeNanoseconds: Any = None
    host_name: Any = ""
    CUDA_DEVICE_MAX_CONNECTIONS: Any = None
    otherData: Any = None


DAMAGE = DecodeError, UnicodeDecodeError
_FILE, _EVENT = Decoder(ChromeTrace | list[Event]), Decoder(Event)
_LIST = re.compile(rb'\s*\[|.*?"traceEvents"\s*:\s*\[', re.DOTALL)
_START = re.compile(rb'[\[,]\s*(?=\{\s*"(?:ph|cat|name|args|ts|dur|pid|tid|id|bp|s)"\s*:|\{[^:]*\Z)')
_STRING = r'"(?:[^"\\]|\\.)*+"'
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_NOT_FINITE = re.compile(rf"{_STRING}|-?\b(?:inf(?:inity)?|nan(?:\([^)]*\))?|1\.#\w+)", re.IGNORECASE | re.DOTALL)
_DECIMAL_COMMA = re.compile(rf"{_STRING}|(:\s*-?\d+),(?=\d+(?:e[-+]?\d+)?\s*[,}}])", re.IGNORECASE | re.DOTALL)


def read_chrome(path: Path, trace: Trace) -> ChromeTrace:
    """Read a file. Counts damage in `trace`. Raises TraceError if it is not a trace, OSError if it cannot be read."""
    data = contents(path, trace.notes)
    try:
        found = _FILE.decode(data)
    except DAMAGE:
        found = _salvaged(data, path, trace)
    return found if isinstance(found, ChromeTrace) else ChromeTrace(found)


def contents(path: Path, notes: list[str], most: int | None = None) -> bytes:
    """The bytes of a file, expanded if it is gzip: the first `most`, and of damaged gzip data those before the damage.

    Appends the damage to `notes`.
    """
    with path.open("rb") as file:
        if file.read(2) != b"\x1f\x8b":
            file.seek(0)
            return file.read(most)
    parts, size = [], 0
    with gzip.open(path) as file:
        try:
            while (most is None or size < most) and (part := file.read1(_CHUNK)):
                parts.append(part)
                size += len(part)
        except EOFError:  # the file is cut off, and so are its events
            pass
        except (zlib.error, gzip.BadGzipFile):
            notes.append("its gzip data is damaged")
    return b"".join(parts)


def _salvaged(data: bytes, path: Path, trace: Trace) -> ChromeTrace:
    """Read the events of a file that is not JSON one by one, and what can be read beside them."""
    if (opening := _LIST.match(data)) is None:
        empty = "; ".join(trace.notes) or "it is empty, or cut off at its start"
        what = f"it begins with {quoted(data[:20])}" if data.strip() else empty
        raise TraceError(f"{path}: not a trace: {what}, and has no list of events: {WANTED}")
    starts = [found.end() for found in _START.finditer(data, opening.end() - 1)]
    found = [_read(data[start:end], trace) for start, end in pairwise(starts)]
    last = data[starts[-1] if starts else opening.end() :]
    ends = [place.start() for place in re.finditer(rb"\]", last)]
    for end in (*ends, len(last)):
        if (one := _read(last[:end], trace)) is not None:
            found.append(one)
            break
    trace.truncated = end == len(last) if starts else b"]" not in last
    trace.skipped += sum(event is None for event in found)
    try:
        beside = _FILE.decode(data[: opening.end()] + b"]" + (last[end + 1 :] or b"}"))
    except DAMAGE:
        beside = None
    read = beside if isinstance(beside, ChromeTrace) else ChromeTrace([])
    read.traceEvents = [event or Event() for event in found]
    return read


def _read(data: bytes, trace: Trace) -> Event | None:
    """One event, None if it cannot be read. Behind it may be a comma."""
    data = data.rstrip(b", \t\r\n")
    if (event := _decoded(data)) is not None:
        return event
    event = _decoded(_repaired(data.decode("utf-8", "surrogateescape")).encode())
    if event is None or None in (event.ts, event.dur):
        return None
    trace.repaired += 1
    return event


def _repaired(text: str) -> str:
    text = re.sub("[\udc80-\udcff]", "\ufffd", text)
    text = re.sub(r"[\x00-\x1f]", " ", text)
    text = _ESCAPE.sub(lambda found: "\\\\" if found[0] == "\\" else found[0], text)
    text = _NOT_FINITE.sub(lambda found: found[0] if found[0][0] == '"' else "null", text)
    return _DECIMAL_COMMA.sub(lambda found: f"{found[1]}." if found[1] else found[0], text)


def _decoded(data: bytes) -> Event | None:
    try:
        return _EVENT.decode(data)
    except DAMAGE:
        return None
