"""Write pictures as a file for ui.perfetto.dev, the viewer that most people know: all devices on one clock.

Each device is a process with these rows: what it did at each moment, communication that is hidden or exposed, causes of
lost time, the phases of each lane, the work of each stream, and the memory.

The format is the Chrome trace format. Perfetto shows slices of one row correctly only if they nest
(https://perfetto.dev/docs/faq), so overlapping slices get rows of their own, and times are whole nanoseconds: a rounded
end is never later than the next start.
"""

import gzip
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ....messages import printable
from ..intervals import difference
from ..lanes import COMMUNICATION, LANES, Lanes, runs
from ..reading.chrome import WRITTEN_BY
from .picture import Picture, Slice

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
        shifted = (one._replace(start=one.start + picture.shift_us, end=one.end + picture.shift_us) for one in slices)
        for part in without_overlap(shifted):
            row += 1
            yield from _named("thread", number, row, title, row)
            for start, end, one in part:
                yield {"ph": "X", "pid": number, "tid": row, "ts": start / 1e3, "dur": (end - start) / 1e3,
                       "name": one.name, "args": one.args or {}}  # fmt: skip
    for time, allocated, reserved in picture.lanes.memory.tolist():
        yield {"ph": "C", "pid": number, "ts": round(time + picture.shift_us, 3), "name": "memory, bytes",
               "args": {"allocated": allocated, "reserved": reserved}}  # fmt: skip


def _named(what: str, process: int, thread: int, name: str, order: int) -> Iterator[dict[str, Any]]:
    for key, value in (("name", name), ("sort_index", order)):
        yield {"ph": "M", "pid": process, "tid": thread, "name": f"{what}_{key}", "args": {key: value}}


def without_overlap(slices: Iterable[Slice]) -> list[list[tuple[int, int, Slice]]]:
    """Divide slices into rows without overlap, each with its start and end in whole nanoseconds."""
    rows: list[list[tuple[int, int, Slice]]] = []
    for one in sorted(slices, key=lambda one: one[:2]):
        start, end = round(one.start * 1e3), round(one.end * 1e3)
        free = next((row for row in rows if row[-1][1] <= start), None)
        if free is None:
            rows.append(free := [])
        free.append((start, end, one))
    return rows


def _rows(picture: Picture) -> Iterator[tuple[str, Iterable[Slice]]]:
    """Yield the rows of a device: title and slices, from the start of its first event."""
    lanes = picture.lanes
    yield "account", picture.account
    comm, exposed = lanes.busy(lanes.lane == COMMUNICATION), lanes.exposed
    hidden = _slices("hidden", difference(comm, exposed)), _slices("exposed", exposed)
    yield "communication", [one for slices in hidden for one in slices]
    yield "causes", [
        Slice(cause.start_us, cause.end_us, cause.title, {
            "kind": cause.kind, "evidence": list(cause.evidence), "what to change": cause.remedy,
            "time, us": cause.cost_us, "gain, us": cause.gain_us,
        }) for cause in picture.verdicts
    ]  # fmt: skip
    for lane, title in enumerate(LANES):
        parts = runs(lanes.select(lanes.lane == lane), float("inf"))
        yield f"{title}, phases", [Slice(r.start, r.end, lanes.phases[r.phase]) for r in parts if r.phase >= 0]
    for number, stream in enumerate(lanes.streams):
        yield f"stream {stream}", _work(lanes.select(lanes.stream == number))


def _slices(name: str, intervals: Any) -> list[Slice]:
    return [Slice(start, end, name) for start, end in intervals.tolist()]


def _work(lanes: Lanes) -> Iterator[Slice]:
    """The kernels, copies and transfers, with all that the trace says about them."""
    columns = (lanes.start, lanes.end, lanes.name, lanes.category, lanes.phase, lanes.collective, lanes.bytes)
    for start, end, name, category, phase, collective, size in zip(*(c.tolist() for c in columns), strict=True):
        facts: dict[str, Any] = {"category": lanes.categories[category]}
        if phase >= 0:
            facts["phase"] = lanes.phases[phase]
        if collective >= 0:
            known = lanes.collectives[collective]._asdict()
            facts |= {key: value for key, value in known.items() if value not in (None, "", (), 0)}
        if size:
            facts["bytes"] = size
        yield Slice(start, end, lanes.names[name], facts)
