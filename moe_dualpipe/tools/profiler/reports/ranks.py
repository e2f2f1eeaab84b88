"""Which ranks were late, and why, as text."""

from typing import TYPE_CHECKING

from ....messages import plural, printable
from ..lateness import Lateness

if TYPE_CHECKING:
    from ..files import TraceFiles

MAX_LATE = 4  # ranks whose lateness is explained
LEAST_SHARE = 0.01
"""A rank is not late if the others had nothing to do for a smaller share of its window."""
_MOST_REASONS = 3  # of one kind
_LEAST_REASON = 0.1  # share of all reasons


def lateness_text(files: "TraceFiles") -> str:
    """Say which ranks made the others wait, and why; "" if no collectives could be compared."""
    if not files.comparison.meetings:
        return ""
    late = [
        (name, one, one.waited_us / device.analysis.window_us)
        for name, one, device in zip(files.names, files.lateness, files.devices, strict=True)
        if one.waited_us > LEAST_SHARE * device.analysis.window_us
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
        f"{name} was late: the others waited {one.waited_us:,.0f} us for it with nothing else to do "
        f"({share:.1%} of the window).\n   {why}"
    )
