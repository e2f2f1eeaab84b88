"""Analyses in words and tables."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..profiler.analyze import Analysis
from .tables import markdown

if TYPE_CHECKING:
    from ..profiler.files import TraceFiles
    from ..profiler.measure import Measurement

MOST_WAITS = 8


def analysis_text(analysis: Analysis, phases: bool = False, kernels: int = 0, streams: bool = False) -> str:
    """What there was, what of it was hidden, and what the exposed rest waited for.

    Further tables: of the phases, of so many kernels that took the most time, of the streams.
    """
    tables = [overview({analysis.name: analysis}, in_window=True)]
    if analysis.waits:
        tables.append(_waits(analysis))
    if phases and analysis.phases:
        tables.append(_phases(analysis))
    if streams:
        rows = [[stream, f"{busy:,.0f}"] for stream, busy in analysis.streams.items()]
        tables.append([["thread" if analysis.device == "cpu" else "stream", "busy, us"], *rows])
    if kernels:
        rows = [
            [
                kernel.name[:60],
                kernel.kind,
                str(kernel.times),
                f"{kernel.total_us:,.0f}",
                str(kernel.most_blocks or "-"),
            ]
            for kernel in analysis.kernels[:kernels]
        ]
        tables.append([["kernel", "kind", "times", "us together", "blocks"], *rows])
    return "\n\n".join([*map(markdown, tables), hidden_sentence(analysis)])


def overview(analyses: dict[str, Analysis], in_window: bool = False) -> list[list[str]]:
    """Rows of a table: one column for each analysis, and of a single one its share of the window."""
    rows = [["", *(f"{name}, us" for name in analyses), *(["of the window"] * in_window)]]
    for what, key in (
        ("window", "window_us"),
        ("busy", "busy_us"),
        ("computation", "compute_us"),
        ("communication", "comm_us"),
        ("- hidden behind computation", "overlapped_us"),
        ("- exposed", "exposed_comm_us"),
        ("idle", "idle_us"),
    ):
        times = [getattr(analysis, key) for analysis in analyses.values()]
        rows.append([what, *(f"{time:,.0f}" for time in times)])
        if in_window:
            (analysis,) = analyses.values()
            rows[-1].append(f"{times[0] / analysis.window_us:.1%}" if analysis.window_us else "-")
    return rows


def traces_text(files: "TraceFiles", phases: bool = False, kernels: int = 0, streams: bool = False) -> str:
    """The report of each device, and where there are several, a table that compares them."""
    parts = [f"{d.path}\n{analysis_text(d.analysis, phases, kernels, streams)}" for d in files.devices]
    return "\n\n".join([*parts, *([compare_ranks(files)] if len(files.devices) > 1 else [])])


def compare_ranks(files: "TraceFiles", names: Sequence[str] | None = None) -> str:
    """A row for each device; with what it waited for the others, if that can be known."""
    rows = [["", "window, us", "computation", "communication", "exposed", "hidden", "waited for others"]]
    for name, device, other in zip(names or files.names, files.devices, files.skews, strict=True):
        a = device.analysis
        times = (a.window_us, a.compute_us, a.comm_us, a.exposed_comm_us)
        waited = "-" if other.waited_us is None else f"{other.waited_us:,.0f}"
        rows.append([name, *(f"{time:,.0f}" for time in times), share(a.hidden_fraction), waited])
    return markdown(rows)


def measurement_text(measured: "Measurement") -> str:
    """Both ways of rank 0 side by side, and how far the overlapped one is from the bound."""
    analyses = {way: files.devices[0].analysis for way, files in measured.runs.items()}
    sequential, overlapped = (analysis.window_us for analysis in analyses.values())
    work, ranks, several = measured.work, measured.num_ranks, len(measured.runs["overlapped"].devices) > 1
    parts = [
        f"{work.described}; experts over {ranks} rank{'s' if ranks > 1 else ''}"
        f"{', of which this is rank 0' if several else ''}\n{measured.link}",
        markdown(overview(analyses)),
        compare_phases(analyses, work.layers * (1 if work.mode == "train" else 2)),
        f"bound, the larger of computation and communication alone: {measured.bound_us:,.0f} us; overlapped took "
        f"{overlapped / measured.bound_us:.2f} of it, and {overlapped / sequential:.2f} of sequential\n"
        f"hidden: {share(analyses['overlapped'].hidden_fraction)} of the communication, "
        f"{share(analyses['sequential'].hidden_fraction)} in sequence",
    ]
    if several:
        parts.insert(3, f"overlapped, by rank:\n\n{compare_ranks(measured.runs['overlapped'])}")
    return "\n\n".join(parts)


def _waits(analysis: Analysis) -> list[list[str]]:
    """The longest; the others in one row."""
    shown, rest = analysis.waits[:MOST_WAITS], analysis.waits[MOST_WAITS:]
    cpu = analysis.device == "cpu"
    rows = [["nothing computed during", "until", "times", "us", "not traced" if cpu else "not launched yet"]]
    for wait in shown:
        what = wait.during or "(nothing)"
        sync = f" ({wait.sync_us:,.0f} in a sync)" if wait.sync_us >= 0.5 else ""
        rows.append([_short(what), _short(wait.before or "the end"), str(wait.times), f"{wait.total_us:,.0f}"])
        rows[-1].append(f"{wait.host_us:,.0f}{sync}")
    if rest:
        sums = [sum(getattr(wait, key) for wait in rest) for key in ("times", "total_us", "host_us")]
        rows.append([f"{len(rest)} more", "", *(f"{number:,.0f}" for number in sums)])
    return rows


def _short(name: str) -> str:
    """At most 40 characters, without what autograd puts before an operator's name."""
    return name.removeprefix("autograd::engine::evaluate_function: ")[:40]


def _phases(analysis: Analysis) -> list[list[str]]:
    rows = [
        [phase.name, str(phase.times)]
        + [f"{time / phase.times:,.0f}" for time in (phase.compute_us, phase.comm_us, phase.exposed_comm_us)]
        for phase in analysis.phases
    ]
    return [["phase", "times", "computation, us each", "communication", "exposed"], *rows]


def compare_phases(analyses: dict[str, Analysis], times: int) -> str:
    """What the work of each phase took in each of the analyses, which have names: microseconds, divided by the number
    of `times` that a micro-batch went through a layer."""
    by_name = {way: {phase.name: phase for phase in analysis.phases} for way, analysis in analyses.items()}
    columns = ("computation", "compute_us"), ("communication", "comm_us"), ("exposed", "exposed_comm_us")
    rows = [[f"us a layer and micro-batch: {' -> '.join(analyses)}", *(what for what, _ in columns)]]
    for name in dict.fromkeys(name for phases in by_name.values() for name in phases):
        found = [phases.get(name) for phases in by_name.values()]
        cells = [[f"{getattr(phase, key) / times:,.0f}" if phase else "-" for phase in found] for _, key in columns]
        rows.append([name, *(" -> ".join(cell) if set(cell) - {"0", "-"} else "" for cell in cells)])
    return markdown(rows)


def share(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def hidden_sentence(analysis: Analysis) -> str:
    """One sentence."""
    if analysis.hidden_fraction is None:
        return "There is no communication, so nothing to hide."
    kind = "transfer" if analysis.device == "cpu" else "kernel"
    blocks = f", on up to {analysis.comm_blocks} thread blocks" if analysis.comm_blocks else ""
    blocks += f" of a GPU of {analysis.num_sms} SMs" if blocks and analysis.num_sms else ""
    return (
        f"{share(analysis.hidden_fraction)} of the communication is hidden "
        f"({analysis.num_comm} {kind}{'s' if analysis.num_comm != 1 else ''}{blocks})."
    )
