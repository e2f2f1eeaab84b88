"""Reports about ranks as text: their collectives and which of them were late, and why."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....messages import list_ranks, plural, printable
from ...drawing.tables import markdown
from ..collectives import CollectiveRow
from ..lateness import Lateness

if TYPE_CHECKING:
    from ..files import TraceFiles

MAX_LATE = 4  # ranks whose lateness is explained
LEAST_SHARE = 0.01
"""A rank is not late if the others had nothing to do for a smaller share of its window."""
_MOST_RANKS = 8  # of a group whose ranks are listed
_MOST_REASONS = 3  # of one kind
_LEAST_REASON = 0.1  # share of all reasons


def collectives_text(rows: Sequence[CollectiveRow]) -> str:
    """Return a table with one row per kind, group and type."""
    if not rows:
        return "There are no collectives."
    cells = [["collective", "group", "times", "bytes", "us", "exposed", "GB/s", "bus GB/s"]]
    for row in rows:
        kind = f"{printable(row.kind, 60)}{f', {row.dtype}' if row.dtype else ''}"
        rates = [_rate(rate, row.is_lower_limit) for rate in (row.algorithm_gb_s, row.bus_gb_s)]
        cells.append([kind, _group(row), *_numbers(row), *rates])
    text = markdown(cells)
    if any(row.is_lower_limit and row.algorithm_gb_s is not None for row in rows):
        text += "\n\n>= : a lower limit, because the time may contain waits for ranks without a trace."
    return text


def _numbers(one: CollectiveRow) -> list[str]:
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


def lateness_text(files: "TraceFiles") -> str:
    """Say which ranks made the others wait, how often and why; "" if no collectives could be compared."""
    if not any(files.lateness):
        return ""
    late = [
        (name, one, one.waited_us / device.analysis.window_us)
        for name, one, device in zip(files.names, files.lateness, files.devices, strict=True)
        if one is not None and one.waited_us > LEAST_SHARE * device.analysis.window_us
    ]
    if not late:
        return "No rank made the others wait, with nothing else to do, for more than 1% of the window."
    late.sort(key=lambda item: -item[1].waited_us)
    lines = [_late(*item) for item in late[:MAX_LATE]]
    if rest := len(late) - MAX_LATE:
        lines += [f"{plural(rest, 'more rank')} made the others wait, for less time."] * (rest > 0)
    return "\n".join(lines)


def _late(name: str, one: Lateness, share: float) -> str:
    more = [
        f"{', '.join(filter(None, (reason.kind, printable(reason.detail, 80))))} ({reason.us:,.0f} us)"
        for reason in one.reasons if reason.us > _LEAST_REASON * one.waited_us
    ]  # fmt: skip
    why = f"It spent more time than they did on {'; '.join(more[:_MOST_REASONS])}." if more else (
        "In total, nothing took it longer than them: the ranks are late in turn."
    )  # fmt: skip
    return (
        f"{name} was late: it joined {one.last:,} of {plural(one.joined, 'collective')} last. The others waited "
        f"{one.waited_us:,.0f} us for it with nothing else to do ({share:.1%} of the window).\n   {why}"
    )
