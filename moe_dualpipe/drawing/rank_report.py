"""Reports about ranks as text: their collectives."""

from collections.abc import Sequence

from ..messages import list_ranks, plural, printable
from ..profiler.collectives import CollectiveRow, Place
from .tables import markdown

MAX_PLACES = 4  # rows of a collective's places; one more row counts the rest
_MOST_RANKS = 8  # of a group whose ranks are listed


def collectives_text(rows: Sequence[CollectiveRow]) -> str:
    """Return a table with one row per kind, group and type, each followed by rows of the places that launched it."""
    if not rows:
        return "There are no collectives."
    cells = [["collective", "group", "times", "bytes", "us", "exposed", "GB/s", "bus GB/s"]]
    for row in rows:
        kind = f"{printable(row.kind, 60)}{f', {row.dtype}' if row.dtype else ''}"
        rates = [_rate(rate, row.is_lower_limit) for rate in (row.algorithm_gb_s, row.bus_gb_s)]
        cells.append([kind, _group(row), *_numbers(row), *rates])
        for place in row.places[:MAX_PLACES]:
            cells.append([f"- {printable(place.name, 60)}", "", *_numbers(place), "", ""])
        if rest := len(row.places) - MAX_PLACES:
            cells += [[f"- {rest} more", *[""] * 7]] * (rest > 0)
    text = markdown(cells)
    if any(row.is_lower_limit and row.algorithm_gb_s is not None for row in rows):
        text += "\n\n>= : a lower limit, because the time may contain waits for ranks without a trace."
    return text


def _numbers(one: CollectiveRow | Place) -> list[str]:
    return [f"{one.count:,}", _size(one.bytes), f"{one.total_us:,.0f}", f"{one.exposed_us:,.0f}"]


def _size(number: int | None) -> str:
    if number is None:
        return "-"
    unit, divisor = next(((u, d) for u, d in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if number >= d), ("B", 1))
    return f"{number:,} B" if unit == "B" else f"{number / divisor:,.1f} {unit}"


def _group(row: CollectiveRow) -> str:
    ranks = plural(row.size, "rank") if row.size else "-"
    if 0 < len(row.ranks) <= _MOST_RANKS:
        ranks = list_ranks(row.ranks)
    return f"{printable(row.group, 40)}: {ranks}" if row.group else ranks


def _rate(gb_s: float | None, is_lower_limit: bool) -> str:
    return "-" if gb_s is None else f"{'>= ' * is_lower_limit}{gb_s:,.2f}"
