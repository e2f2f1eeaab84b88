"""What the web page of lanes shows, as JSON: names once, and of each device columns of numbers.

A page has at most MAX_PIECES pieces. If there are more events, short ones that start close to each other in one row
become one piece. It has the name of the longest of them, their number, and the sum of their times.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ....messages import plural, printable
from ..intervals import Intervals
from ..kernel_names import short_name
from ..lanes import LANES, Ints, Lanes
from ..trace import Collective
from .palette import EXPOSED, HIDDEN, STYLES, has_letters, styles_of
from .picture import Picture

MAX_PIECES = 200_000
MAX_POINTS = 5000  # of the memory of a device
_LONGEST_NAME = 1000


@dataclass(frozen=True)
class Pieces:
    """Events of a device, sorted by lane, row and start. Some are several events in one: `count`, with `busy` us."""

    lanes: Lanes
    count: Ints
    busy: NDArray[np.float64]


def page_data(pictures: Sequence[Picture], note: str = "") -> dict[str, Any]:
    """Return the object that the page's script reads (web/data.js)."""
    end = max(picture.end_us for picture in pictures)
    letters = has_letters([picture.lanes for picture in pictures])
    found, shortest = pieces_of([picture.lanes for picture in pictures], end)
    notes = [note] if note else []
    if shortest:
        notes.append(f"work shorter than {shortest:,.1f} us is drawn together")
    names: dict[str, int] = {}
    details: dict[tuple[Collective | None, int], int] = {}
    devices = [
        _device(picture, pieces, styles_of(pieces.lanes, letters), names, details)
        for picture, pieces in zip(pictures, found, strict=True)
    ]
    return {
        "end": end, "notes": notes, "strip": letters, "lanes": LANES,
        "styles": [[style.label, style.color, style.ink] for style in STYLES],
        "exposed": STYLES.index(EXPOSED), "hidden": STYLES.index(HIDDEN),
        "details": [_detail(*facts) for facts in details],
        "names": [printable(name, _LONGEST_NAME) for name in names], "short": [short_name(name) for name in names],
        "devices": devices,
    }  # fmt: skip


def _device(
    picture: Picture, pieces: Pieces, styles: Ints, names: dict[str, int],
    details: dict[tuple[Collective | None, int], int],
) -> dict[str, Any]:  # fmt: skip
    lanes, joined = pieces.lanes, bool((pieces.count > 1).any())

    def numbers(index: Ints, texts: tuple[str, ...]) -> list[int]:
        used = {number: names.setdefault(texts[number], len(names)) for number in np.unique(index[index >= 0]).tolist()}
        return [used.get(number, -1) for number in index.tolist()]

    facts = [
        details.setdefault((lanes.collectives[of] if of >= 0 else None, size), len(details)) if of >= 0 or size else -1
        for of, size in zip(lanes.collective.tolist(), lanes.bytes.tolist(), strict=True)
    ]
    phases, phase = np.unique(lanes.phase, return_inverse=True)
    start = lanes.start + picture.shift_us
    return {
        "title": printable(picture.title, _LONGEST_NAME), "shift": picture.shift_us,
        "start": start.round(3).tolist(), "length": (lanes.end - lanes.start).round(3).tolist(),
        "lane": lanes.lane.tolist(), "row": lanes.row.tolist(), "style": styles.tolist(),
        "name": numbers(lanes.name, lanes.names), "stream": numbers(lanes.stream, lanes.streams),
        "phase": phase.reshape(-1).tolist(), "phases": numbers(phases, lanes.phases),
        "count": pieces.count.tolist() if joined else None,
        "busy": pieces.busy.round(3).tolist() if joined else None,
        "detail": facts if max(facts, default=-1) >= 0 else None,
        "exposed": _bounded(picture.lanes.exposed + picture.shift_us).round(3).tolist(),
        "memory": _memory(lanes.memory, picture.shift_us, picture.lanes.end_us),
        "verdicts": [_verdict(verdict, picture.shift_us) for verdict in picture.verdicts],
    }  # fmt: skip


def _detail(collective: Collective | None, size: int) -> list[list[str]]:
    """Facts about a transfer or a copy, as pairs of what and value."""
    facts = []
    if collective is not None:
        group = ", ".join(filter(None, (collective.group, collective.description)))
        ranks = plural(collective.size, "rank") if collective.size else ""
        facts = [
            ("collective", collective.name), ("group", " of ".join(filter(None, (group, ranks)))),
            ("elements in", _number(collective.in_elems)), ("elements out", _number(collective.out_elems)),
            ("type", collective.dtype), ("peer", _number(collective.peer)),
        ]  # fmt: skip
    facts.append(("bytes", _number(size or None)))
    return [[what, printable(value, _LONGEST_NAME)] for what, value in facts if value]


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _memory(points: NDArray[np.float64], shift: float, end: float) -> dict[str, list[float]] | None:
    """The points within the time of the lanes, and the last one before. Of too many, the highest in equal intervals."""
    inside = points[points[:, 0] <= end]
    first = int(np.searchsorted(inside[:, 0], 0.0, side="right"))
    inside = inside[max(first - 1, 0) :].copy()
    if not len(inside):
        return None
    inside[:, 0] = inside[:, 0].clip(min=0.0)
    if len(inside) > MAX_POINTS:
        interval = np.floor(inside[:, 0] / (end or 1.0) * MAX_POINTS)
        inside = inside[np.lexsort((-inside[:, 1], interval))]
        inside = inside[np.concatenate([[True], np.diff(np.sort(interval)) > 0])]
        inside = inside[np.argsort(inside[:, 0], kind="stable")]
    time, allocated, reserved = inside.T
    return {
        "time": (time + shift).round(3).tolist(), "allocated": allocated.tolist(), "reserved": reserved.tolist(),
    }  # fmt: skip


def _verdict(verdict: Any, shift: float) -> dict[str, Any]:
    texts = {key: printable(getattr(verdict, key), _LONGEST_NAME) for key in ("kind", "title", "remedy", "place")}
    return {
        **texts, "evidence": [printable(sentence, _LONGEST_NAME) for sentence in verdict.evidence],
        "start": verdict.start_us + shift, "end": verdict.end_us + shift, "cost": verdict.cost_us,
        "gain": verdict.gain_us, "fraction": verdict.gain_fraction,
    }  # fmt: skip


def pieces_of(devices: Sequence[Lanes], end: float) -> tuple[list[Pieces], float]:
    """Return at most MAX_PIECES pieces, or one per row if that is more, and the length below which events were joined.

    The length is 0 if no events were joined.
    """
    found = [_sorted(lanes) for lanes in devices]
    if sum(len(pieces.count) for pieces in found) <= MAX_PIECES:
        return found, 0.0
    shortest = end / MAX_PIECES / 10
    while sum(_count_joined(pieces.lanes, shortest) for pieces in found) > MAX_PIECES and shortest <= end:
        shortest *= 1.1
    return [_joined(pieces.lanes, shortest) for pieces in found], shortest


def _sorted(lanes: Lanes) -> Pieces:
    lanes = lanes.select(np.lexsort((lanes.start, lanes.row, lanes.lane)))
    return Pieces(lanes, np.ones(len(lanes.start), dtype=np.int64), lanes.end - lanes.start)


def _count_joined(lanes: Lanes, shortest: float) -> int:
    """Return how many pieces `_joined` makes of sorted lanes."""
    short = lanes.end - lanes.start < shortest
    lane, row, interval = lanes.lane[short], lanes.row[short], np.floor(lanes.start[short] / shortest)
    new = (np.diff(lane) != 0) | (np.diff(row) != 0) | (np.diff(interval) != 0)
    return int((~short).sum() + new.sum() + short.any())


def _joined(lanes: Lanes, shortest: float) -> Pieces:
    """Join events shorter than `shortest` that start in the same interval of this length."""
    length = lanes.end - lanes.start
    interval = np.where(length < shortest, np.floor(lanes.start / shortest), -1)
    alone = np.where(length < shortest, -1, np.arange(len(length)))  # a number of its own for each long event
    sort = np.lexsort((-length, alone, interval, lanes.row, lanes.lane))
    lanes, length, interval, alone = lanes.select(sort), length[sort], interval[sort], alone[sort]
    new = np.ones(len(length), dtype=bool)
    new[1:] = (np.diff(lanes.lane) != 0) | (np.diff(lanes.row) != 0) | (np.diff(interval) != 0) | (np.diff(alone) != 0)
    first = np.flatnonzero(new)  # the longest event of each piece
    columns = {"start": np.minimum.reduceat(lanes.start, first), "end": np.maximum.reduceat(lanes.end, first)}
    joined = replace(lanes.select(first), **columns)
    count = np.diff(first, append=len(length))
    busy = np.add.reduceat(length, first)
    order = np.lexsort((joined.start, joined.row, joined.lane))
    return Pieces(joined.select(order), count[order], busy[order])


def _bounded(intervals: Intervals) -> Intervals:
    """Close the shortest gaps if there are more than a tenth of MAX_PIECES intervals."""
    most = MAX_PIECES // 10
    if len(intervals) <= most:
        return intervals
    gaps = intervals[1:, 0] - intervals[:-1, 1]
    closed = np.argsort(gaps, kind="stable")[: len(intervals) - most]
    ends = np.ones(len(intervals), dtype=bool)
    ends[closed] = False
    return np.stack([intervals[np.concatenate([[True], ends[:-1]]), 0], intervals[ends, 1]], axis=1)
