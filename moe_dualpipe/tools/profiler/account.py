"""Divide the window of a device into times that add up to it: at each moment it did exactly one thing.

    computation             a kernel computes; the detail is its category, and the part of the program
    slowed computation      the part of it by which kernels take longer because others run beside them
    copies                  no kernel computes, and a copy or fill runs, by direction, peer and size
    exposed communication   only a transfer runs; the detail is the transfer, and the computation that comes after it
    waiting for a rank      the part of an exposed transfer until the last rank has joined it
    idle: ...               nothing runs, by what the host did: it launched, synchronized, allocated memory, loaded
                            data, saved a checkpoint, was in the optimizer, or ran Python. "queued": the host had
                            launched what comes next. "not recorded": the trace does not say.

A moment belongs to the first of these that applies, and of several events of one kind to the one that started first. So
no time counts twice: every other report sums up entries of this account.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ...overlap.labels import OPTIMIZER as OPTIMIZER_PART
from .categories import category_of, short_name
from .intervals import Intervals, as_intervals, difference, intervals_of, union
from .trace import WAITS, DeviceEvent, Trace

COMPUTATION, SLOWED, COPY = "computation", "slowed computation", "copies"
TRANSFER, WAITING = "exposed communication", "waiting for a rank"
SYNCHRONIZING, ALLOCATING, LOADER, CHECKPOINT, OPTIMIZER, LAUNCHING, PYTHON, QUEUED, UNKNOWN = IDLE = tuple(
    f"idle: {what}" for what in (
        "synchronizing", "allocating", "data loader", "checkpoint", "optimizer", "launching", "Python", "queued",
        "not recorded",
    )
)  # fmt: skip
KINDS = (COMPUTATION, SLOWED, COPY, TRANSFER, WAITING, *IDLE)
LOST = KINDS[1:]
"""Kinds of lost time: everything except computation at full speed."""
LEAST_SHARE = 0.01
"""Lost time, and causes that would save less than this share of the window, are not reported."""

_CALLS = (
    (SYNCHRONIZING, WAITS),
    (ALLOCATING, re.compile(r"^(?:cuda|hip)(?:Malloc|Free|Host(?:Alloc|Register))|^cuMem(?:Create|Map|Alloc|Free)")),
)
_ANNOTATIONS = (
    (LOADER, re.compile(r"DataLoader|data_?load|next_?batch|load batch", re.IGNORECASE)),
    (CHECKPOINT, re.compile(r"checkpoint|state_dict|\bsav(?:e|ing)\b|torch\.save", re.IGNORECASE)),
    (OPTIMIZER, re.compile(rf"^Optimizer\.|^{OPTIMIZER_PART}$")),
)
_NUMBER = re.compile(r"\b\d+\b")
_NEARBY = 64
"""The next annotation is searched among this many events."""

Key = tuple[str, str]
"""A kind and a detail."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A span of time on one device, and its use. Times in microseconds of the trace."""

    start_us: float
    end_us: float
    kind: str
    """One of KINDS."""
    detail: str = ""

    @property
    def us(self) -> float:
        return self.end_us - self.start_us


def _owners(spans: Iterable[tuple[float, float, int]], times: np.ndarray) -> np.ndarray:
    """The owner of each time; -1 for none. A moment belongs to the span that started first.

    spans: start, end and owner.
    """
    start, end, owner = np.array([*sorted(spans), (np.inf, np.inf, -1)], np.float64).T
    reach = np.maximum.accumulate(end)
    start[1:] = np.maximum(start[1:], reach[:-1])
    kept = end > start
    start, end, owner = start[kept], np.append(end[kept], -np.inf), np.append(owner[kept], -1)
    found = np.searchsorted(start, times, side="right") - 1
    return np.where(times < end[found], owner[found], -1).astype(np.int64)


def account(trace: Trace) -> list[Entry]:
    """Return the entries of one device, sorted and without gaps from its first to its last event.

    trace: from `as_device`, with the events of this device only.
    """
    events = sorted((e for e in trace.device_events if e.end > e.start), key=lambda event: event.start)
    if not events:
        return []
    start, end = events[0].start, max(event.end for event in events)
    computing, copies, transfers = (
        [event for event in events if event.kind == kind] for kind in ("compute", "copy", "comm")
    )
    layers = [
        [(event.start, event.end, (COMPUTATION, _computation(event))) for event in computing],
        [(event.start, event.end, (COPY, copy_name(event))) for event in copies],
        [(event.start, event.end, (TRANSFER, folded(event.place))) for event in transfers],
        *_idle(trace, events, start, end),
    ]
    edges = np.unique([start, end, *(edge for spans in layers for one in spans for edge in one[:2])])
    edges = edges[(edges >= start) & (edges <= end)]
    keys = {(PYTHON if any(map(trace.launch_of, events)) else UNKNOWN, ""): 0}
    numbered = [[(a, b, keys.setdefault(key, len(keys))) for a, b, key in spans] for spans in layers]
    owner = np.zeros(len(edges) - 1, np.int64)
    for spans in reversed(numbered):
        found = _owners(spans, edges[:-1])
        owner = np.where(found >= 0, found, owner)
    first = np.flatnonzero(np.diff(owner, prepend=-1))
    pieces = zip(edges[first].tolist(), [*edges[first[1:]].tolist(), end], owner[first].tolist(), strict=True)
    return list(_named(pieces, [*keys], computing))


def _computation(event: DeviceEvent) -> str:
    """The detail of a kernel: its category, and the part of the program that launched it."""
    place = f" in {folded(event.phase)}" if event.is_named else ""
    return f"{category_of(event)}{place}"


Spans = list[tuple[float, float, Key]]


def _idle(trace: Trace, events: Sequence[DeviceEvent], start: float, end: float) -> Iterator[Spans]:
    """Yield the reasons why nothing ran, the most important first: start, end, and kind and detail."""
    if events[0].device == "cpu":
        yield [(wait.start, wait.end, (SYNCHRONIZING, wait.name)) for wait in trace.waits]
        return
    gaps = difference(np.array([[start, end]]), union(intervals_of(events)))
    starts = [event.start for event in events]
    following = np.searchsorted(starts, gaps[:, 1]).tolist()
    before = ((gap, events[at]) for gap, at in zip(gaps.tolist(), following, strict=True) if at < len(events))
    launched = [(*gap, trace.launch_of(event)) for gap, event in before]
    yield [(max(begin, call.end), end, (QUEUED, "")) for begin, end, call in launched if call and call.end < end]
    yield [(begin, end, (UNKNOWN, "")) for begin, end, call in launched if call is None]
    yield from host_spans(trace).values()


def host_spans(trace: Trace) -> dict[str, Spans]:
    """The activities of the threads that launch work, by kind, the most important first. The rest of their time is
    PYTHON."""
    threads = {call.thread for _, call in trace.launches_of_work()}
    calls = [call for call in trace.launches.values() if call.thread in threads]
    annotations = [one for one in trace.annotations if one.thread in threads]
    found: dict[str, Spans] = {}
    for kind, name in _CALLS:
        found[kind] = [(call.start, call.end, (kind, call.name)) for call in calls if name.search(call.name)]
    for kind, name in _ANNOTATIONS:
        inside = [one for one in annotations if name.search(one.name)]
        found[kind] = [(one.start, one.end, (kind, folded(short_name(one.name)))) for one in inside]
    return found | {LAUNCHING: [(call.start, call.end, (LAUNCHING, "")) for call in calls]}


def _named(
    pieces: Iterable[tuple[float, float, int]], keys: Sequence[Key], computing: Sequence[DeviceEvent]
) -> Iterator[Entry]:
    """Yield the entries of pieces. The detail of a transfer and of idle time also names what is computed next."""
    starts = [event.start for event in computing]
    at = 0
    known: dict[tuple[int, str], str] = {}
    for start, end, owner in pieces:
        kind, detail = keys[owner]
        if kind == TRANSFER or not detail:
            while at < len(starts) and starts[at] < end:
                at += 1
            key = at, detail
            following = known.get(key) or known.setdefault(key, _next(computing[at : at + _NEARBY], detail))
            detail = f"{detail} before {following}".strip()
        yield Entry(start, end, kind, detail)


def without_next(detail: str) -> str:
    """A detail without what was computed next."""
    return detail.partition("before ")[0].strip()


def _next(events: Sequence[DeviceEvent], during: str) -> str:
    """The name of the phase that computes next. Kernels of `during`, the transfer itself, only unpack rows."""
    named = (folded(event.place) for event in events if event.is_named)
    return next((name for name in named if name != during), short_name(events[0].name) if events else "the end")


def folded(name: str) -> str:
    """A name without the numbers that count: "token 12" -> "token *"."""
    return _NUMBER.sub("*", name)


def copy_name(event: DeviceEvent) -> str:
    """A copy by direction, peer and size: "Memcpy DtoH (Device -> Pageable), 8 B"."""
    size = event.bytes
    unit, divisor = next(((u, d) for u, d in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if size >= d), ("B", 1))
    return f"{event.name}, {size / divisor:,.3g} {unit}" if size else event.name


def relabeled(entries: Iterable[Entry], spans: Sequence[Entry], kinds: Sequence[str]) -> list[Entry]:
    """The account with the entries of these kinds cut at `spans`, which give them another kind and prefix the detail.

    spans: sorted. A moment belongs to the span that started first.
    """
    starts = [span.start_us for span in spans]
    reach = [*accumulate((span.end_us for span in spans), max)]
    found = []
    for entry in entries:
        start = entry.start_us
        cutting = range(bisect_right(reach, start), bisect_left(starts, entry.end_us)) if entry.kind in kinds else ()
        for span in (spans[at] for at in cutting):
            begin, end = max(start, span.start_us), min(span.end_us, entry.end_us)
            if begin >= end:
                continue
            if begin > start:
                found.append(replace(entry, start_us=start, end_us=begin))
            detail = ", ".join(filter(None, (span.detail, entry.detail)))
            found.append(Entry(begin, end, span.kind, detail))
            start = end
        if start < entry.end_us:
            found.append(replace(entry, start_us=start))
    return found


def spans_of(entries: Iterable[Entry], *kinds: str) -> Intervals:
    """The moments of some kinds of entries."""
    return union(as_intervals((entry.start_us, entry.end_us) for entry in entries if entry.kind in kinds))


class Total(NamedTuple):
    """All entries of one kind and detail."""

    kind: str
    detail: str
    times: int
    us: float


def totals(entries: Iterable[Entry]) -> list[Total]:
    """The sums by kind and detail, longest first."""
    found: dict[Key, Total] = {}
    for kind, detail, us in ((entry.kind, entry.detail, entry.us) for entry in entries):
        before = found.get((kind, detail), Total(kind, detail, 0, 0.0))
        found[kind, detail] = before._replace(times=before.times + 1, us=before.us + us)
    return sorted(found.values(), key=lambda total: -total.us)
