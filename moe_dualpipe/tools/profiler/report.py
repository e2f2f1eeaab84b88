"""Reports of traces: accounts of devices, the hidden share, and causes of lost time; two recordings compared.

Two recordings are compared by a table of their differences, which add up. As in `analyze`, a step lasts from its first
computation to that of the next one. So the last step only tells where the one before ends, and recordings of different
lengths can be compared. A recording can have several devices: its numbers are means over them. If a recording has no
steps, whole recordings are compared.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ...messages import plural, printable
from ..drawing.tables import markdown
from .account import KINDS, LEAST_SHARE, LOST, WAITING, Key, totals, without_next
from .analyze import Analysis
from .doctor.verdict import Verdict
from .doctor.view import MOST_EVENTS

MAX_DETAILS = 8  # rows of lost times in an account
MOST_DETAILS = 12  # rows of differences
HEALTHY = "All that is not computation at full speed takes less than 1% of the window, or has the causes above."


def analysis_text(analysis: Analysis, phases: bool = False) -> str:
    """Return the report of one device: its account, and the hidden share.

    phases: add a table of them.
    """
    parts = [markdown(account_rows({analysis.name: analysis}, details=True))]
    if phases and analysis.phases:
        parts.append(markdown(phase_rows({analysis.name: analysis})))
    return "\n\n".join([*parts, analysis.hidden_sentence])


def account_rows(analyses: dict[str, Analysis], details: bool = False) -> list[list[str]]:
    """Return table rows with one column of times per analysis, which add up to its window.

    details: also the largest lost times, and all times as shares of the window. `analyses` must then have one entry.
    """
    every, rows = [*analyses.values()], [["", *(f"{name}, us" for name in analyses), *(["of the window"] * details)]]
    whole = every[0].window_us

    def add(what: str, times: Sequence[float]) -> None:
        share = [f"{times[0] / whole:.1%}" if whole else "-"] * details
        rows.append([what, *(f"{time:,.0f}" for time in times), *share])

    add("window", [analysis.window_us for analysis in every])
    lost = [total for total in totals(every[0].account) if total.kind in LOST][:MAX_DETAILS] if details else []
    for kind in KINDS:
        times = [analysis.time_of(kind) for analysis in every]
        if max(times) < 0.5:
            continue
        add(kind, times)
        for total in lost:
            if total.kind == kind and total.us >= 0.5:
                add(f"- {printable(total.detail, 80)}", [total.us])
    if any(analysis.comm_us for analysis in every):
        add("communication, hidden and exposed", [analysis.comm_us for analysis in every])
        if any(analysis.copy_engine_us for analysis in every):
            add("- on copy engines, with 0 SMs", [analysis.copy_engine_us for analysis in every])
        add("- hidden behind computation", [analysis.hidden_kernels_us for analysis in every])
    return rows


def compare_ranks(names: Sequence[str], analyses: Sequence[Analysis]) -> str:
    """Return a table with one row per device."""
    rows = [["", "window, us", "computation", "communication", "exposed", "hidden", "waiting for a rank"]]
    for name, a in zip(names, analyses, strict=True):
        times = (a.window_us, a.kernel_compute_us, a.comm_us, a.exposed_comm_us)
        waited = f"{a.time_of(WAITING):,.0f}"
        rows.append([name, *(f"{time:,.0f}" for time in times), percent(a.hidden_fraction), waited])
    return markdown(rows)


def phase_rows(analyses: dict[str, Analysis]) -> list[list[str]]:
    """Return table rows with the time of each phase: of one analysis, or of several with an arrow between them."""
    columns = ("computation, us each", "compute_us"), ("communication", "comm_us"), ("exposed", "exposed_comm_us")
    heading = "phase" if len(analyses) == 1 else f"phase: {' -> '.join(analyses)}"
    rows = [[heading, "times", *(title for title, _ in columns)]]
    by_name = [{phase.name: phase for phase in analysis.phases} for analysis in analyses.values()]
    for name in dict.fromkeys(name for phases in by_name for name in phases):
        found = [phases.get(name) for phases in by_name]
        cells = [[f"{phase.times:,}" if phase else "-" for phase in found]]
        cells += [[f"{getattr(one, key) / one.times:,.0f}" if one else "-" for one in found] for _, key in columns]
        rows.append([name, *(" -> ".join(cell) for cell in cells)])
    return rows


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def verdicts_text(analysis: Analysis) -> str:
    """Return a numbered list: what happens and where, the evidence, the predicted gain, and what to change.

    If the device has more events than are searched, it says so.
    """
    parts, num_events = [], analysis.num_events
    if num_events > MOST_EVENTS:
        parts.append(f"Causes were searched only in the first {MOST_EVENTS:,} of {num_events:,} events of the device.")
    verdicts, lost = analysis.verdicts, analysis.time_of(*LOST) / max(analysis.window_us, 1e-9)
    parts += [_verdict_text(number, verdict, lost) for number, verdict in enumerate(verdicts, start=1)]
    return "\n".join([*parts, _unexplained(analysis)])


def _unexplained(analysis: Analysis) -> str:
    """The lost time that no cause explains, with its three largest places."""
    left, whole = sum(total.us for total in analysis.unexplained), analysis.window_us
    if left < LEAST_SHARE * whole:
        return HEALTHY
    places = [
        f"{total.kind}, {printable(total.detail, 80)} ({total.us / whole:.1%})" for total in analysis.unexplained[:3]
    ]
    return f"Not explained: {left:,.0f} us ({left / whole:.1%} of the window). Most of it: {'; '.join(places)}."


def _verdict_text(number: int, verdict: Verdict, lost: float) -> str:
    """lost: the lost time as a share of the window."""
    place = f" Most of it: {printable(verdict.place, 80)}." if verdict.place else ""
    gain = "The gain cannot be predicted."
    if verdict.gain_us is not None and verdict.gain_fraction is not None:
        gain = f"Without it, the window would be {verdict.gain_us:,.0f} us ({verdict.gain_fraction:.1%}) shorter."
    of_lost = f" ({verdict.share / lost:.0%} of the lost time)" if lost else ""
    explained = f"It explains {verdict.share:.1%} of the window{of_lost}. {gain} {verdict.remedy}"
    lines = [f"{number}. {printable(verdict.title).removesuffix('.')} ({printable(verdict.kind)}).{place}"]
    lines += [printable(sentence, 400) for sentence in (*verdict.evidence, explained)]
    return "\n   ".join(lines)


# ---- Two recordings compared ----


def compare(a: Sequence[Analysis], b: Sequence[Analysis], names: tuple[str, str] = ("A", "B")) -> dict[str, Any]:
    """Return a JSON object: the devices of both recordings, and the times of each kind and detail of their accounts.

    Times are per step if all devices have steps, otherwise of the whole recordings. The largest difference comes first.
    """
    every = {"a": a, "b": b}
    by_step = all(analysis.steps for analysis in (*a, *b))
    us = {side: _mean_account(analyses, by_step) for side, analyses in every.items()}
    rows = []
    for kind, detail in us["a"] | us["b"]:
        us_a, us_b = (times.get((kind, detail), 0.0) for times in us.values())
        rows.append({"kind": kind, "detail": detail, "a_us": us_a, "b_us": us_b, "difference_us": us_b - us_a})
    rows.sort(key=lambda row: (-abs(row["difference_us"]), row["kind"], row["detail"]))
    step_a, step_b = (sum(row[f"{side}_us"] for row in rows) for side in every)
    sides = {"a": _side(names[0], a, step_a), "b": _side(names[1], b, step_b)}
    return {"by_step": by_step, **sides, "difference_us": step_b - step_a, "account": rows}


def _side(name: str, analyses: Sequence[Analysis], step_us: float) -> dict[str, Any]:
    """A recording. steps: the number of steps of every device, at least."""
    comm = sum(analysis.comm_us for analysis in analyses)
    hidden = sum(analysis.hidden_kernels_us for analysis in analyses) / comm if comm else None
    gpus, steps = {analysis.gpu for analysis in analyses}, min(len(analysis.steps) for analysis in analyses)
    return {"name": name, "devices": len(analyses), "gpus": sorted(gpus - {""}), "steps": steps, "step_us": step_us,
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


def comparison_text(found: dict[str, Any]) -> str:
    """Return what `compare` found: both recordings, how their steps differ, and by which times."""
    a, b = found["a"], found["b"]
    heads = [_side_text("A", a), _side_text("B", b)]
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


def _side_text(letter: str, side: dict[str, Any]) -> str:
    gpus = f" ({printable(', '.join(side['gpus']))})" if side["gpus"] else ""
    devices = plural(side["devices"], "device") + gpus
    steps = plural(side["steps"], "step") if side["steps"] else "no steps"
    return f"{letter}: {printable(side['name'])}: {devices}, {steps}"


def _difference_sentence(found: dict[str, Any]) -> str:
    a, b, difference = found["a"]["step_us"], found["b"]["step_us"], found["difference_us"]
    what = "A step" if found["by_step"] else "The recording"
    share = abs(difference) / a if a else 0.0
    more = f"{abs(difference):,.0f} us {'more' if difference > 0 else 'less'}"
    return f"{what} of B takes {more} ({share:.1%}) than of A: {b:,.0f} us instead of {a:,.0f} us."


def _table(heading: str, rows: Iterable[tuple[str, float, float]]) -> str:
    """A table of times in A and B, and how they differ."""
    shown = [[heading, "A", "B", "B - A", "change"]]
    for name, a, b in rows:
        change = "-" if a < 0.5 else f"{b / a - 1:+.1%}" if b < 10 * a else f"{b / a:,.0f} times"
        shown.append([printable(name, 80), f"{a:,.0f}", f"{b:,.0f}", f"{b - a:+,.0f}", change])
    return markdown(shown)
