"""Compare two recordings: two analyses, and a table of their differences, which add up.

As in `analyze`, a step lasts from its first computation to that of the next one. So the last step only tells where the
one before ends, and recordings of different lengths can be compared. A recording can have several devices: its numbers
are means over them. If a recording has no steps, whole recordings are compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...messages import plural, printable
from ..drawing.tables import markdown
from .account import KINDS, Key, without_next
from .analyze import Analysis
from .report import percent

_SAME = 0.005  # steps that differ by a smaller share take the same time
_MOST_DETAILS = 12


@dataclass(frozen=True, slots=True)
class Recording:
    """One or more devices, recorded together."""

    name: str
    devices: int
    gpus: list[str]
    """Names of the GPUs; empty if unknown."""
    steps: int
    """Number of steps that were recorded, at least, on every device; 0: none."""
    step_us: float
    """The length of a step, or of the recording."""
    hidden_fraction: float | None
    on_cpu: bool
    """Whether the devices are CPUs."""


class Difference(NamedTuple):
    """The time of one kind and detail of the account in A and B."""

    kind: str
    detail: str
    a_us: float
    b_us: float
    difference_us: float


@dataclass(frozen=True)
class RecordingDifference:
    """Two recordings, A and B. Times are per step if `by_step`, otherwise of the whole recordings."""

    by_step: bool
    a: Recording
    b: Recording
    difference_us: float
    """How much longer the step of B is."""
    account: Sequence[Difference]
    """The largest difference first."""

    def as_object(self) -> dict[str, Any]:
        """A JSON object."""
        found: dict[str, Any] = {**asdict(self), "account": [row._asdict() for row in self.account]}
        del found["a"]["on_cpu"], found["b"]["on_cpu"]
        return found


def compare(a: Sequence[Analysis], b: Sequence[Analysis], names: tuple[str, str] = ("A", "B")) -> RecordingDifference:
    """Compare the devices of two recordings."""
    steps = [min(len(analysis.steps) for analysis in one) for one in (a, b)]
    us_a, us_b = (_mean_account(one, by_step=min(steps) > 0) for one in (a, b))
    rows = [
        Difference(*key, us_a.get(key, 0.0), us_b.get(key, 0.0), us_b.get(key, 0.0) - us_a.get(key, 0.0))
        for key in {**us_a, **us_b}
    ]
    rows.sort(key=lambda row: (-abs(row.difference_us), row.kind, row.detail))
    step_a, step_b = sum(row.a_us for row in rows), sum(row.b_us for row in rows)
    first, second = _recording(names[0], a, steps[0], step_a), _recording(names[1], b, steps[1], step_b)
    return RecordingDifference(min(steps) > 0, first, second, step_b - step_a, rows)


def _mean_account(analyses: Sequence[Analysis], by_step: bool) -> dict[Key, float]:
    """The time of each kind and detail: of one step, or of the whole recording."""
    found: dict[Key, float] = defaultdict(float)
    for analysis in analyses:
        start, end, steps = float("-inf"), float("inf"), 1
        if by_step and len(analysis.steps) > 1:
            start, end, steps = analysis.steps[0].start, analysis.steps[-1].start, len(analysis.steps) - 1
        for entry in analysis.account:
            us = max(min(entry.end_us, end) - max(entry.start_us, start), 0.0)
            found[entry.kind, without_next(entry.detail)] += us / steps / len(analyses)
    return found


def _recording(name: str, analyses: Sequence[Analysis], steps: int, step_us: float) -> Recording:
    comm = sum(analysis.comm_us for analysis in analyses)
    hidden = sum(analysis.hidden_kernels_us for analysis in analyses) / comm if comm else None
    gpus = sorted({analysis.gpu for analysis in analyses} - {""})
    return Recording(name, len(analyses), gpus, steps, step_us, hidden, analyses[0].device == "cpu")


def difference_text(found: RecordingDifference) -> str:
    """Return the difference of the steps, the account of both, and the largest differences in it."""
    a, b = found.a, found.b
    parts = [_heading("A", a), _heading("B", b)]
    unit, step, what = ("us per step", "step", "A step") if found.by_step else ("us", "recording", "The recording")
    if not found.by_step:
        unknown = " and ".join(letter for letter, one in (("A", a), ("B", b)) if not one.steps)
        parts.append(f"No steps are recorded in {unknown}: whole recordings are compared.")
    share = abs(found.difference_us) / a.step_us if a.step_us else 0.0
    more = f"{abs(found.difference_us):,.0f} us {'more' if found.difference_us > 0 else 'less'}"
    change = f"of B takes {more} ({share:.1%}) than of A: {b.step_us:,.0f} us instead of {a.step_us:,.0f} us."
    if share < _SAME:
        change = f"takes the same time in A and B, within {_SAME:.1%}: {a.step_us:,.0f} us and {b.step_us:,.0f} us."
    kinds = [(step, a.step_us, b.step_us)]
    for kind in KINDS:
        same = [row for row in found.account if row.kind == kind]
        times = sum(row.a_us for row in same), sum(row.b_us for row in same)
        kinds += [(f"- {kind}", *times)] * (max(times) >= 0.5)
    details = [
        (", ".join(filter(None, (row.kind, row.detail))), row.a_us, row.b_us) for row in found.account[:_MOST_DETAILS]
    ]
    if rest := found.account[_MOST_DETAILS:]:
        details.append((f"{len(rest)} more", sum(row.a_us for row in rest), sum(row.b_us for row in rest)))
    tables = [_table(unit, kinds), _table("the largest differences", details)]
    hidden = ""
    if a.hidden_fraction is not None or b.hidden_fraction is not None:
        hidden = (
            f"Of the communication, {percent(a.hidden_fraction)} is hidden behind computation in A, and "
            f"{percent(b.hidden_fraction)} in B."
        )
    return "\n\n".join(filter(None, ["\n".join(parts), f"{what} {change}", *tables, hidden]))


def _heading(letter: str, one: Recording) -> str:
    kinds = "CPU" if one.on_cpu else printable(", ".join(one.gpus))
    devices = plural(one.devices, "device") + (f" ({kinds})" if kinds else "")
    return f"{letter}: {printable(one.name)}: {devices}, {plural(one.steps, 'step') if one.steps else 'no steps'}"


def _table(heading: str, rows: Iterable[tuple[str, float, float]]) -> str:
    """A table of times in A and B, and how they differ."""
    shown = [[heading, "A", "B", "B - A", "change"]]
    for name, a, b in rows:
        change = "-" if a < 0.5 else f"{b / a - 1:+.1%}" if b < 10 * a else f"{b / a:,.0f} times"
        shown.append([printable(name, 80), f"{a:,.0f}", f"{b:,.0f}", f"{b - a:+,.0f}", change])
    return markdown(shown)
