"""Reports of overlap analyses as text: tables in Markdown, and one sentence with the hidden share."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....messages import plural, printable
from ...drawing.tables import markdown
from ..account import KINDS, LOST, WAITING, totals
from ..analyze import Analysis
from .verdicts import verdicts_text

if TYPE_CHECKING:
    from ..files import TracedDevice, TraceFiles
    from ..measure import Measurement

MAX_DETAILS = 8  # lost times of which the account has a row of their own


def analysis_text(analysis: Analysis, phases: bool = False) -> str:
    """Return the report of one device: its account, and the hidden share.

    phases: add a table of them.
    """
    tables = [account_rows({analysis.name: analysis}, details=True)]
    if phases and analysis.phases:
        tables.append(_phase_rows(analysis))
    return "\n\n".join([*map(markdown, tables), hidden_sentence(analysis)])


def account_rows(analyses: dict[str, Analysis], details: bool = False) -> list[list[str]]:
    """Return table rows with one column of times per analysis, which add up to its window.

    details: also the largest lost times, and all times as shares of the window. `analyses` must then have one entry.
    """
    rows = [["", *(f"{name}, us" for name in analyses), *(["of the window"] * details)]]
    whole = max((analysis.window_us for analysis in analyses.values()), default=0.0)

    def add(what: str, times: Sequence[float]) -> None:
        share = [f"{times[0] / whole:.1%}" if whole else "-"] * details
        rows.append([what, *(f"{time:,.0f}" for time in times), *share])

    sums = [{total.kind: total.us for total in totals(analysis.account, False)} for analysis in analyses.values()]
    lost = [total for analysis in analyses.values() for total in totals(analysis.account) if total.kind in LOST]
    add("window", [analysis.window_us for analysis in analyses.values()])
    for kind in KINDS:
        times = [found.get(kind, 0.0) for found in sums]
        if max(times, default=0.0) < 0.5:
            continue
        add(kind, times)
        for total in lost[:MAX_DETAILS] if details else ():
            if total.kind == kind and total.us >= 0.5:
                add(f"- {printable(total.detail, 80)}", [total.us])
    if any(analysis.comm_us for analysis in analyses.values()):
        add("communication, hidden and exposed", [analysis.comm_us for analysis in analyses.values()])
        if any(analysis.copy_engine_us for analysis in analyses.values()):
            add("- on copy engines, with 0 SMs", [analysis.copy_engine_us for analysis in analyses.values()])
        add("- hidden behind computation", [analysis.hidden_kernels_us for analysis in analyses.values()])
    return rows


def traces_text(files: "TraceFiles", phases: bool = False) -> str:
    """Return the report of each device and, if there are several, a table that compares them."""
    parts = []
    for device in files.devices:
        text = analysis_text(device.analysis, phases)
        parts.append("\n".join(filter(None, [printable(device.path), device.left_out, text])))
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


def measurement_text(measurement: "Measurement") -> str:
    """Return both runs beside each other and the lower bound."""
    analyses = {run: device.analysis for run, device in measurement.devices.items()}
    sequential, overlapped = analyses["sequential"], analyses["overlapped"]
    workload, ranks, bound = measurement.workload, measurement.num_ranks, measurement.bound_us
    possible = "" if measurement.possible is None else f"{percent(measurement.possible)} possible, reached "
    parts = [
        f"{workload.description}; experts over {plural(ranks, 'rank')}\n{measurement.link}",
        markdown(account_rows(analyses)),
        compare_phases(analyses, workload.layers * (1 if workload.mode == "train" else 2)),
        f"lower bound (computation or communication alone, whichever is longer): {bound:,.0f} us\n"
        f"overlapped: {overlapped.window_us / bound:.2f} of the bound, "
        f"{overlapped.window_us / sequential.window_us:.2f} of sequential\n"
        f"hidden communication: {possible}{percent(overlapped.hidden_fraction)} overlapped, "
        f"{percent(sequential.hidden_fraction)} sequential",
    ]
    return "\n\n".join(parts)


def _phase_rows(analysis: Analysis) -> list[list[str]]:
    rows = [
        [phase.name, f"{phase.times:,}"]
        + [f"{time / phase.times:,.0f}" for time in (phase.compute_us, phase.comm_us, phase.exposed_comm_us)]
        for phase in analysis.phases
    ]
    return [["phase", "times", "computation, us each", "communication", "exposed"], *rows]


def compare_phases(analyses: dict[str, Analysis], times: int) -> str:
    """Return a table of each phase's time in each analysis: microseconds per layer and micro-batch.

    times: the number of passes of a micro-batch through a layer. All times are divided by it.
    """
    by_name = {run: {phase.name: phase for phase in analysis.phases} for run, analysis in analyses.items()}
    columns = ("computation", "compute_us"), ("communication", "comm_us"), ("exposed", "exposed_comm_us")
    rows = [[f"us per layer and micro-batch: {' -> '.join(analyses)}", *(what for what, _ in columns)]]
    for name in dict.fromkeys(name for phases in by_name.values() for name in phases):
        found = [phases.get(name) for phases in by_name.values()]
        cells = [[f"{getattr(phase, key) / times:,.0f}" if phase else "-" for phase in found] for _, key in columns]
        rows.append([name, *(" -> ".join(cell) if set(cell) - {"0", "-"} else "" for cell in cells)])
    return markdown(rows)


def percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{fraction:.1%}"


def hidden_sentence(analysis: Analysis) -> str:
    """Say how much communication is hidden, in how many transfers, and how many thread blocks they occupy."""
    if analysis.hidden_fraction is None:
        return "There is no communication."
    is_kernel = analysis.device != "cpu" and not analysis.copy_engine_us
    kernels = plural(analysis.num_comm, "kernel" if is_kernel else "transfer")
    blocks = f", on up to {analysis.comm_blocks} thread blocks" if analysis.comm_blocks else ""
    blocks += f" of a GPU of {analysis.num_sms} SMs" if blocks and analysis.num_sms else ""
    return f"{percent(analysis.hidden_fraction)} of the communication is hidden ({kernels}{blocks})."
