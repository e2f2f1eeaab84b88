"""Compare two recordings: two analyses, and a table of their differences, which add up.

As in `analyze`, a step lasts from its first computation to that of the next one. So the last step only tells where the
one before ends, and recordings of different lengths can be compared. A recording can have several devices: its numbers
are means over them. If a recording has no steps, whole recordings are compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ...messages import plural, printable
from ..drawing.tables import markdown
from .account import KINDS, Key, without_next
from .analyze import Analysis
from .report import percent

SAME = 0.005  # steps that differ by a smaller share take the same time
MOST_DETAILS = 12


def compare(a: Sequence[Analysis], b: Sequence[Analysis], names: tuple[str, str] = ("A", "B")) -> dict[str, Any]:
    """Return a JSON object: the devices of both recordings, and the times of each kind and detail of their accounts.

    Times are per step if all devices have steps, otherwise of the whole recordings. The largest difference comes first.
    """
    sides = {"a": _side(names[0], a), "b": _side(names[1], b)}
    by_step = all(side["steps"] for side in sides.values())
    us_a, us_b = _mean_account(a, by_step), _mean_account(b, by_step)
    rows = []
    for kind, detail in {**us_a, **us_b}:
        of_a, of_b = us_a.get((kind, detail), 0.0), us_b.get((kind, detail), 0.0)
        rows.append({"kind": kind, "detail": detail, "a_us": of_a, "b_us": of_b, "difference_us": of_b - of_a})
    rows.sort(key=lambda row: (-abs(row["difference_us"]), row["kind"], row["detail"]))
    for name, side in sides.items():
        side["step_us"] = sum(row[f"{name}_us"] for row in rows)
    difference = sides["b"]["step_us"] - sides["a"]["step_us"]
    return {"by_step": by_step, **sides, "difference_us": difference, "account": rows}


def _side(name: str, analyses: Sequence[Analysis]) -> dict[str, Any]:
    """A recording. steps: the number of steps of every device, at least."""
    comm = sum(analysis.comm_us for analysis in analyses)
    hidden = sum(analysis.hidden_kernels_us for analysis in analyses) / comm if comm else None
    gpus, steps = {analysis.gpu for analysis in analyses}, min(len(analysis.steps) for analysis in analyses)
    return {"name": name, "devices": len(analyses), "gpus": sorted(gpus - {""}), "steps": steps, "step_us": 0.0,
            "hidden_fraction": hidden}  # fmt: skip


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


def comparison_text(found: dict[str, Any], on_cpu: Sequence[bool] = (False, False)) -> str:
    """Return what `compare` found: both recordings, how their steps differ, and by which times.

    on_cpu: for A and B, whether its devices are CPUs.
    """
    a, b = found["a"], found["b"]
    heads = [_side_text("A", a, on_cpu[0]), _side_text("B", b, on_cpu[1])]
    if not found["by_step"]:
        unknown = " and ".join(letter for letter, side in (("A", a), ("B", b)) if not side["steps"])
        heads.append(f"No steps are recorded in {unknown}: whole recordings are compared.")
    rows = [(row["kind"], row["detail"], row["a_us"], row["b_us"]) for row in found["account"]]
    kinds = [("step" if found["by_step"] else "recording", a["step_us"], b["step_us"])]
    for kind in KINDS:
        us_a, us_b = (sum(row[side] for row in rows if row[0] == kind) for side in (2, 3))
        if max(us_a, us_b) >= 0.5:
            kinds.append((f"- {kind}", us_a, us_b))
    details = [(", ".join(filter(None, row[:2])), *row[2:]) for row in rows[:MOST_DETAILS]]
    if rest := rows[MOST_DETAILS:]:
        details.append((f"{len(rest)} more", sum(row[2] for row in rest), sum(row[3] for row in rest)))
    parts = ["\n".join(heads), _difference_sentence(found)]
    parts += [_table("us per step" if found["by_step"] else "us", kinds), _table("the largest differences", details)]
    hidden = a["hidden_fraction"], b["hidden_fraction"]
    if hidden != (None, None):
        shares = f"{percent(hidden[0])} is hidden behind computation in A, and {percent(hidden[1])} in B"
        parts.append(f"Of the communication, {shares}.")
    return "\n\n".join(parts)


def _side_text(letter: str, side: dict[str, Any], on_cpu: bool) -> str:
    kinds = "CPU" if on_cpu else printable(", ".join(side["gpus"]))
    devices = plural(side["devices"], "device") + (f" ({kinds})" if kinds else "")
    steps = plural(side["steps"], "step") if side["steps"] else "no steps"
    return f"{letter}: {printable(side['name'])}: {devices}, {steps}"


def _difference_sentence(found: dict[str, Any]) -> str:
    a, b, difference = found["a"]["step_us"], found["b"]["step_us"], found["difference_us"]
    what = "A step" if found["by_step"] else "The recording"
    share = abs(difference) / a if a else 0.0
    if share < SAME:
        return f"{what} takes the same time in A and B, within {SAME:.1%}: {a:,.0f} us and {b:,.0f} us."
    more = f"{abs(difference):,.0f} us {'more' if difference > 0 else 'less'}"
    return f"{what} of B takes {more} ({share:.1%}) than of A: {b:,.0f} us instead of {a:,.0f} us."


def _table(heading: str, rows: Iterable[tuple[str, float, float]]) -> str:
    """A table of times in A and B, and how they differ."""
    shown = [[heading, "A", "B", "B - A", "change"]]
    for name, a, b in rows:
        change = "-" if a < 0.5 else f"{b / a - 1:+.1%}" if b < 10 * a else f"{b / a:,.0f} times"
        shown.append([printable(name, 80), f"{a:,.0f}", f"{b:,.0f}", f"{b - a:+,.0f}", change])
    return markdown(shown)
