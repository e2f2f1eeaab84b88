"""The work of one device as columns of numbers, for pictures: one row per device event, in three lanes.

Events of one lane that run at the same time are drawn above each other, in different rows: each stream has its own row
if it shares time with others, otherwise streams share a row.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .categories import category_of
from .communication import NAMES, Names
from .host import host_as_device
from .intervals import EMPTY, Intervals, difference, intersection, union, union_length
from .phases import Phases
from .trace import Collective, DeviceEvent, HostEvent, Trace

LANES = "computation", "communication", "copies"
COMPUTATION, COMMUNICATION, COPIES = range(3)
LANE_OF_KIND = {"compute": COMPUTATION, "comm": COMMUNICATION, "copy": COPIES}
MAX_ROWS = 4
"""Rows of a lane. The last one holds all further streams, which then cover each other."""
_MOST_STREAMS = 64  # streams of a lane for which a row is searched
_SHARED = 0.005  # streams that share less of their time may share a row: clocks are not exact

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Lanes:
    """The device events of one device, sorted by start. Times are in microseconds, from the start of the first event.

    The columns have one entry per event; `name`, `stream`, `category`, `phase` are indices into the tuples.
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    lane: Ints
    """Index in LANES."""
    row: Ints
    """Row in the lane."""
    name: Ints
    stream: Ints
    category: Ints
    phase: Ints
    """One occurrence of a phase, such as one annotation; -1 for none."""
    collective: Ints
    """Index into `collectives`; -1 if unknown."""
    bytes: Ints
    """Bytes that a copy or fill moves; 0 if unknown."""
    names: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    """Names of the phases. Each occurrence has an entry."""
    collectives: tuple[Collective, ...] = ()
    memory: NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 3)))
    """Time, allocated and reserved bytes of each point, sorted by time."""

    @property
    def end_us(self) -> float:
        return float(self.end.max(initial=0.0))

    @property
    def exposed(self) -> Intervals:
        """Communication while neither kernels nor copies run."""
        return difference(self.busy(self.lane == COMMUNICATION), self.busy(self.lane != COMMUNICATION))

    def busy(self, chosen: NDArray[np.bool_]) -> Intervals:
        """Return the union of the intervals of the chosen events."""
        return union(np.stack([self.start[chosen], self.end[chosen]], axis=1))

    def select(self, rows: NDArray[Any]) -> "Lanes":
        """Return the events that an index or a mask selects."""
        return replace(self, **{column: getattr(self, column)[rows] for column in COLUMNS})


COLUMNS = "start", "end", "lane", "row", "name", "stream", "category", "phase", "collective", "bytes"


def device_lanes(trace: Trace, device: str, names: Names = NAMES) -> Lanes:
    """Return the events of `device`."""
    trace = host_as_device(trace, names)
    events = sorted((event for event in trace.device_events if event.device == device), key=lambda event: event.start)
    origin = events[0].start if events else 0.0

    def integers(values: Iterable[int]) -> Ints:
        return np.fromiter(values, np.int64, len(events))

    def indexed(values: Iterable[Any]) -> tuple[Ints, tuple[Any, ...]]:
        """Number the values in the order in which they are first seen; None is -1."""
        index: dict[Any, int] = {}
        return integers(-1 if v is None else index.setdefault(v, len(index)) for v in values), tuple(index)

    known = Phases(trace, names)

    def phase_of(event: DeviceEvent) -> tuple[str, HostEvent | None] | None:
        found = known.name_of(event)
        return None if found == event.name and not known.is_named(event) else (found, known.owner_of(event))

    start = np.fromiter((event.start for event in events), np.float64, len(events)) - origin
    end = np.fromiter((event.end for event in events), np.float64, len(events)) - origin
    kinds = [names.kind_of(event) for event in events]
    lane = integers(LANE_OF_KIND[kind] for kind in kinds)
    stream, streams = indexed(event.stream for event in events)
    name, kernels = indexed(event.name for event in events)
    category, categories = indexed(category_of(event, kind) for event, kind in zip(events, kinds, strict=True))
    phase, phases = indexed(map(phase_of, events))
    collective, collectives = indexed(event.collective for event in events)
    return Lanes(
        start, end, lane, _rows(start, end, lane, stream), name, stream, category, phase, collective,
        integers(event.bytes for event in events), kernels, streams, categories,
        tuple(text for text, _ in phases), collectives, _memory(trace, device, origin),
    )  # fmt: skip


def _memory(trace: Trace, device: str, origin: float) -> NDArray[np.float64]:
    points = [(p.time_us - origin, p.allocated, p.reserved) for p in trace.memory if p.device == device]
    return np.array(sorted(points), dtype=np.float64).reshape(-1, 3)


def _rows(start: NDArray[np.float64], end: NDArray[np.float64], lane: Ints, stream: Ints) -> Ints:
    """Return the row of each event in its lane. The busiest stream comes first; each takes the first row with space."""
    rows = np.zeros(len(start), dtype=np.int64)
    for of_lane in (lane == number for number in range(len(LANES))):
        held: list[Intervals] = []
        times = np.bincount(stream[of_lane], (end - start)[of_lane])
        known = sorted(dict.fromkeys(stream[of_lane].tolist()), key=lambda number: -times[number])
        for number in known[:_MOST_STREAMS]:
            chosen = of_lane & (stream == number)
            own = union(np.stack([start[chosen], end[chosen]], axis=1))
            row = _free_row(held, own)
            held[row : row + 1] = [union(np.concatenate([held[row] if row < len(held) else EMPTY, own]))]
            rows[chosen] = row
        if len(known) > _MOST_STREAMS:
            rows[of_lane & np.isin(stream, known[_MOST_STREAMS:])] = MAX_ROWS - 1
    return rows


def _free_row(held: Sequence[Intervals], own: Intervals) -> int:
    for row, other in enumerate(held):
        if union_length(intersection(other, own)) <= _SHARED * min(union_length(own), union_length(other)):
            return row
    return min(len(held), MAX_ROWS - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighboring events of one row that belong to the same phase or, without a phase, have the same name."""

    lane: int
    row: int
    start: float
    end: float
    phase: int
    """-1: none."""
    name: int


def runs(lanes: Lanes, gap: float) -> list[Run]:
    """Return the runs, each without gaps longer than `gap`, sorted by lane, row and start."""
    if not len(lanes.start):
        return []
    sort = np.lexsort((lanes.start, lanes.row, lanes.lane))
    lane, row, start, end, phase, name = (
        column[sort] for column in (lanes.lane, lanes.row, lanes.start, lanes.end, lanes.phase, lanes.name)
    )
    own = np.where(phase < 0, name, -1)
    new = np.ones(len(start), dtype=bool)
    same = (np.diff(lane) == 0) & (np.diff(row) == 0) & (np.diff(phase) == 0) & (np.diff(own) == 0)
    new[1:] = ~same | (start[1:] - end[:-1] > gap)
    first = np.flatnonzero(new)
    reach = np.maximum.reduceat(end, first)
    columns = (lane[first], row[first], start[first], reach, phase[first], name[first])
    return [Run(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]
