"""An analysis in words and tables."""

from ..schedule.compare import markdown
from .analyze import Analysis


def as_text(analysis: Analysis, phases: bool = False, kernels: int = 0) -> str:
    """What there was and what of it was hidden; `phases` adds a table of them, `kernels` one of the longest so many."""
    window = analysis.window_us

    def row(what: str, time: float) -> list[str]:
        return [what, f"{time:,.0f}", f"{time / window:.1%}" if window else "-"]

    tables = [
        [
            [f"device {analysis.device}", "us", "of the window"],
            row("window", window),
            row("busy", analysis.busy_us),
            row("computation", analysis.compute_us),
            row("communication", analysis.comm_us),
            row("- hidden behind computation", analysis.overlapped_us),
            row("- exposed", analysis.exposed_comm_us),
            row("idle", analysis.idle_us),
        ]
    ]
    if phases:
        rows = [
            [phase.name, str(phase.times)]
            + [f"{time / phase.times:,.0f}" for time in (phase.compute_us, phase.comm_us, phase.exposed_comm_us)]
            for phase in analysis.phases
        ]
        tables.append([["phase", "times", "computation, us each", "communication", "exposed"], *rows])
    if kernels:
        rows = [
            [kernel.name[:60], kernel.kind, str(kernel.times), f"{kernel.total_us:,.0f}", str(kernel.most_blocks)]
            for kernel in analysis.kernels[:kernels]
        ]
        tables.append([["kernel", "kind", "times", "us together", "blocks"], *rows])
    return "\n\n".join([*map(markdown, tables), verdict(analysis)])


def verdict(analysis: Analysis) -> str:
    """One sentence."""
    if analysis.hidden_fraction is None:
        return "There is no communication, so nothing to hide."
    blocks = f", on up to {analysis.comm_blocks} thread blocks" if analysis.comm_blocks else ""
    return (
        f"{analysis.hidden_fraction:.1%} of the communication is hidden "
        f"({analysis.num_comm} kernel{'s' if analysis.num_comm != 1 else ''}{blocks})."
    )
