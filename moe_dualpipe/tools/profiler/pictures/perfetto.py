"""Write pictures as a file for ui.perfetto.dev, the viewer that most people know: all devices on one clock.

Each device is a process with these rows: what it did at each moment, causes of lost time, the phases of each lane, and
the work of each stream.

The format is the Chrome trace format. Perfetto shows slices of one row correctly only if they nest
(https://perfetto.dev/docs/faq), so overlapping slices get rows of their own, and times are whole nanoseconds: a rounded
end is never later than the next start.
"""

import gzip
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....messages import printable
from ..categories import category_of
from ..reading.chrome import WRITTEN_BY
from ..trace import DeviceEvent
from .picture import LANES, Picture, Slice, runs

_MOST_ROWS = 1000  # of a device


def write_perfetto(pictures: Sequence[Picture], path: Path) -> None:
    """Write the pictures, compressed if the name ends in ".gz"."""
    events = [event for number, picture in enumerate(pictures, 1) for event in _device(number, picture)]
    data = msgspec.json.encode({"otherData": WRITTEN_BY, "displayTimeUnit": "ms", "traceEvents": events})
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def _device(number: int, picture: Picture) -> Iterator[dict[str, Any]]:
    """Yield the events of one device."""
    yield from _named("process", number, 0, printable(picture.title), number)
    row = number * _MOST_ROWS
    for title, slices in _rows(picture):
        for part in without_overlap(slices, picture.shift_us):
            row += 1
            yield from _named("thread", number, row, title, row)
            for start, end, one in part:
                yield {"ph": "X", "pid": number, "tid": row, "ts": start / 1e3, "dur": (end - start) / 1e3,
                       "name": one.name, "args": one.args or {}}  # fmt: skip


def _named(what: str, process: int, thread: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    for key, value in (("name", name), ("sort_index", order)):
        yield {"ph": "M", "pid": process, "tid": thread, "name": f"{what}_{key}", "args": {key: value}}


def without_overlap(slices: Iterable[Slice], shift_us: float) -> list[list[tuple[int, int, Slice]]]:
    """Divide slices into rows without overlap, each with its shifted start and end in whole nanoseconds."""
    rows: list[list[tuple[int, int, Slice]]] = []
    for one in sorted(slices, key=lambda one: one[:2]):
        start, end = round((one.start + shift_us) * 1e3), round((one.end + shift_us) * 1e3)
        free = next((row for row in rows if row[-1][1] <= start), None)
        if free is None:
            rows.append(free := [])
        free.append((start, end, one))
    return rows


def _rows(picture: Picture) -> Iterator[tuple[str, list[Slice]]]:
    """Yield the rows of a device: title and slices."""
    yield "account", [Slice(one.start_us, one.end_us, one.kind, {"detail": one.detail}) for one in picture.account]
    since = picture.start_us
    yield "causes", [
        Slice(since + cause.start_us, since + cause.end_us, cause.title, {
            "kind": cause.kind, "evidence": list(cause.evidence), "what to change": cause.remedy,
            "time, us": cause.cost_us, "gain, us": cause.gain_us,
        }) for cause in picture.verdicts
    ]  # fmt: skip
    for kind, (lane, _) in LANES.items():
        named = [one for one in picture.of_kind(kind) if one.part]
        yield f"{lane}, phases", [*runs(named, float("inf"))]
    streams: dict[str, list[Slice]] = defaultdict(list)
    for event in picture.work:
        streams[event.stream].append(_slice(event))
    yield from ((f"stream {stream}", slices) for stream, slices in streams.items())


def _slice(event: DeviceEvent) -> Slice:
    """A kernel, copy or transfer, with all that the trace says about it."""
    known = {} if event.collective is None else event.collective._asdict()
    facts = {"phase": event.part, **known, "bytes": event.bytes}
    shown = {key: value for key, value in facts.items() if value not in (None, "", (), 0)}
    return Slice(event.start, event.end, event.name, {"category": category_of(event), **shown})
