"""Reports about ranks as text: their collectives and which of them were late, and why."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....messages import list_ranks, plural, printable
from ...drawing.tables import markdown
from ..account import COMPUTATION
from ..collectives import CollectiveRow
from ..lateness import Lateness, Reason

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
    windows = [device.analysis.window_us for device in files.devices]
    late = [
        (name, one, window)
        for name, one, window in zip(files.names, files.lateness, windows, strict=True)
        if one is not None and one.exposed_us > LEAST_SHARE * window
    ]
    if not late:
        return "No rank made the others wait, with nothing else to do, for more than 1% of the window."
    late.sort(key=lambda item: -item[1].exposed_us)
    lines = [_late(name, one, window) for name, one, window in late[:MAX_LATE]]
    if rest := len(late) - MAX_LATE:
        lines += [f"{plural(rest, 'more rank')} made the others wait, for less time."] * (rest > 0)
    return "\n".join(lines)


def _late(name: str, one: Lateness, window_us: float) -> str:
    hidden = one.delayed_us - one.exposed_us >= 1
    waited = f"{one.delayed_us:,.0f} us for it, {one.exposed_us:,.0f} us of that" if hidden else (
        f"{one.exposed_us:,.0f} us for it")  # fmt: skip
    lines = [
        f"{name} was late: it joined {one.last:,} of {plural(one.joined, 'collective')} last. The others waited "
        f"{waited} with nothing else to do ({one.exposed_us / window_us:.1%} of the window)."
    ]
    by_kind: dict[str, float] = defaultdict(float)
    for reason in one.reasons:
        by_kind[reason.kind] += reason.us
    longer = {kind: us for kind, us in by_kind.items() if us > 0}
    for kind in sorted(longer, key=lambda kind: -longer[kind]):
        if (share := longer[kind] / sum(longer.values())) > _LEAST_REASON:
            ratio = f", {one.compute_ratio:.2f} times the others'" if one.compute_ratio and kind == COMPUTATION else ""
            found = [reason for reason in one.reasons if reason.kind == kind]
            lines.append(f"{'Why' if share > 0.995 else f'Why, {share:.0%}'}: more {kind}{ratio}: {_shares(found)}.")
    if len(lines) == 1:
        lines.append("Why is unknown: nothing that it did before these collectives took longer than on the others.")
    return "\n   ".join(lines)


def _shares(reasons: Sequence[Reason]) -> str:
    """The largest shares of what took longer: "GEMM in mlp(F) (70%), attention (20%)"; without a share if it is all."""
    whole = sum(reason.us for reason in reasons if reason.us > 0)
    shown = [(printable(one.detail, 60), one.us / whole) for one in reasons if one.us > _LEAST_REASON * whole]
    if len(shown) == 1 and shown[0][1] > 0.995:
        return shown[0][0]
    return ", ".join(f"{name} ({share:.0%})" for name, share in shown[:_MOST_REASONS])
