"""What changed between two recordings: the difference of their steps, and tables that explain it."""

from ....messages import plural, printable
from ...drawing.tables import markdown
from ..categories import COMMUNICATION, COPY
from ..compare import Comparison
from ..kernel_names import short_name
from ..recordings import IDLE_TIME, LATE_LAUNCHES, NO_WORK, Recording, Sums
from .overlap import percent

_NAMES = {
    COMMUNICATION: "exposed communication", COPY: "copies", IDLE_TIME: "idle",
    LATE_LAUNCHES: "idle, not launched yet",
}  # fmt: skip
_SAME = 0.005  # steps that differ by a smaller share take the same time


def compare_text(comparison: Comparison) -> str:
    """Return the difference of the steps, and tables of the work, the largest difference first, and the transfers."""
    sides = [_side(letter, one) for letter, one in zip("AB", (comparison.a, comparison.b), strict=True)]
    if not comparison.by_step:
        unknown = [letter for letter, one in zip("AB", (comparison.a, comparison.b), strict=True) if not one.per_step]
        sides.append(f"No steps are recorded in {' and '.join(unknown)}: whole recordings are compared.")
    parts = ["\n".join([*sides, *map(printable, comparison.unlike)]), _difference(comparison)]
    parts += [markdown(_work_rows(comparison))]
    if comparison.transfers:
        parts += [markdown(_transfer_rows(comparison)), _hidden(comparison)]
    return "\n\n".join(parts)


def _side(letter: str, one: Recording) -> str:
    kinds = "CPU" if one.on_cpu else printable(", ".join(one.gpus))
    steps = plural(one.steps, "step") if one.steps else "no steps"
    return f"{letter}: {printable(one.name)}: {plural(one.devices, 'device')}{f' ({kinds})' if kinds else ''}, {steps}"


def _difference(comparison: Comparison) -> str:
    (a, b), whole = (sums.step_us for sums in comparison.sums), comparison.difference_us
    what = "A step" if comparison.by_step else "The recording"
    share = abs(whole) / a if a else 0.0
    if share < _SAME:
        return f"{what} takes the same time in A and B, within {_SAME:.1%}: {a:,.0f} us and {b:,.0f} us."
    more = f"{abs(whole):,.0f} us {'more' if whole > 0 else 'less'}"
    return f"{what} of B takes {more} ({share:.1%}) than of A: {b:,.0f} us instead of {a:,.0f} us."


def _noun(comparison: Comparison) -> str:
    return "operator" if comparison.a.on_cpu and comparison.b.on_cpu else "kernel"


def _number(count: float) -> str:
    """A count per step: "12", or "12.5" if it is not the same in every step."""
    return f"{count:,.0f}" if abs(count - round(count)) < 0.05 else f"{count:,.1f}"


def _work_rows(comparison: Comparison) -> list[list[str]]:
    a, b = comparison.sums
    unit = "us per step" if comparison.by_step else "us"
    rows = [[unit, "A", "B", "B - A", "change", f"{_noun(comparison)}s in A", "in B"]]
    rows.append(["step" if comparison.by_step else "recording", *_times(a.step_us, b.step_us), "", ""])
    for part in comparison.parts:
        counts = ["", ""] if part.name in NO_WORK else [_number(one.count) for one in (part.a, part.b)]
        name = f"- {_NAMES.get(part.name, part.name)}"
        rows.append([name, *_times(part.a.step_us, part.b.step_us), *counts])
    return rows


def _times(a: float, b: float) -> list[str]:
    change = "-" if a < 0.5 else f"{b / a - 1:+.1%}" if b < 10 * a else f"{b / a:,.0f} times"
    return [f"{a:,.0f}", f"{b:,.0f}", f"{b - a:+,.0f}", change]


def _transfer_rows(comparison: Comparison) -> list[list[str]]:
    rows = [["communication", "times in A", "in B", "us in A", "in B", "exposed in A", "in B"]]
    for kind in comparison.transfers:
        cells = [_number(kind.a.count), _number(kind.b.count)]
        for key in ("total_us", "step_us"):
            cells += [f"{getattr(one, key):,.0f}" for one in (kind.a, kind.b)]
        rows.append([short_name(kind.name), *cells])
    return rows


def _hidden_share(sums: Sums) -> float | None:
    return sums.hidden_us / sums.comm_us if sums.comm_us else None


def _hidden(comparison: Comparison) -> str:
    a, b = (percent(_hidden_share(sums)) for sums in comparison.sums)
    return f"Of the communication, {a} is hidden behind computation in A, and {b} in B."
