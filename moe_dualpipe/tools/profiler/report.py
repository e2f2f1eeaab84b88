"""Reports of traces as text: the account of each device, the hidden share, and the causes of lost time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...messages import plural, printable
from ..drawing.tables import markdown
from .account import KINDS, LOST, WAITING, totals
from .analyze import Analysis
from .doctor.device import MOST_EVENTS
from .doctor.verdict import Verdict

if TYPE_CHECKING:
    from .files import TracedDevice, TraceFiles

MAX_DETAILS = 8  # rows of lost times in an account
MOST_VERDICTS = 8
LEAST_SHARE = 0.01
"""A smaller share of the window is not reported as lost."""
HEALTHY = "All that is not computation at full speed takes less than 1% of the window, or has the causes above."


def analysis_text(analysis: Analysis, phases: bool = False) -> str:
    """Return the report of one device: its account, and the hidden share.

    phases: add a table of them.
    """
    parts = [markdown(account_rows({analysis.name: analysis}, details=True))]
    if phases and analysis.phases:
        parts.append(markdown(_phase_rows(analysis)))
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


def traces_text(files: "TraceFiles", phases: bool = False) -> str:
    """Return the report of each device and, if there are several, a table that compares them."""
    parts = []
    for device in files.devices:
        text = analysis_text(device.analysis, phases)
        path = ", ".join(filter(None, [printable(device.path), printable(device.trace.label, 60)]))
        parts.append("\n".join(filter(None, [path, device.left_out, text])))
        parts.append(verdicts_text(device.analysis))
    if len(files.devices) > 1:
        sentences = [printable(sentence, 300) for sentence in files.comparison.sentences]
        parts += [compare_ranks(files.names, files.devices), "\n".join(sentences)]
    return "\n\n".join(filter(None, parts))


def compare_ranks(names: Sequence[str], devices: Sequence["TracedDevice"]) -> str:
    """Return a table with one row per device."""
    rows = [["", "window, us", "computation", "communication", "exposed", "hidden", "waiting for a rank"]]
    for name, device in zip(names, devices, strict=True):
        a = device.analysis
        times = (a.window_us, a.kernel_compute_us, a.comm_us, a.exposed_comm_us)
        waited = f"{a.time_of(WAITING):,.0f}"
        rows.append([name, *(f"{time:,.0f}" for time in times), percent(a.hidden_fraction), waited])
    return markdown(rows)


def _phase_rows(analysis: Analysis) -> list[list[str]]:
    rows = [
        [phase.name, f"{phase.times:,}"]
        + [f"{time / phase.times:,.0f}" for time in (phase.compute_us, phase.comm_us, phase.exposed_comm_us)]
        for phase in analysis.phases
    ]
    return [["phase", "times", "computation, us each", "communication", "exposed"], *rows]


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
    parts += [_verdict_text(number, verdict, lost) for number, verdict in enumerate(verdicts[:MOST_VERDICTS], start=1)]
    if len(verdicts) > MOST_VERDICTS:
        parts.append(f"{plural(len(verdicts) - MOST_VERDICTS, 'smaller cause')} not shown.")
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
