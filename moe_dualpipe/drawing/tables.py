"""Markdown tables."""

from ..schedule.compare import ComparedSchedule
from .captions import format_number, format_range

HEADINGS = ("stages", "step time", "bubble per rank", "share", "activations", "deferred W", "parameters")


def comparison_table(entries: tuple[ComparedSchedule, ...]) -> str:
    """Return one table per number of ranks, each followed by the reasons why some schedules cannot run."""
    tables = []
    for num_ranks in dict.fromkeys(entry.num_ranks for entry in entries):
        here = [entry for entry in entries if entry.num_ranks == num_ranks]
        heading = f"on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        tables.append(markdown([[heading, *HEADINGS], *([entry.name, *_cells(entry)] for entry in here)]))
        if problems := [f"- {entry.problem}" for entry in here if entry.problem]:
            tables.append("\n".join(problems))
    return "\n\n".join(tables)


def _cells(entry: ComparedSchedule) -> list[str]:
    """Return the cells under HEADINGS. Memory is the maximum over the ranks."""
    if (timeline := entry.timeline) is None:
        return ["-"] * len(HEADINGS)
    memory = (timeline.peak_activations, timeline.peak_deferred, timeline.parameters)
    return [
        str(timeline.schedule.num_stages),
        format_number(timeline.makespan),
        format_range(timeline.bubble),
        f"{timeline.bubble_share:.1%}",
        *(format_number(max(entry.in_model_stages(counts))) for counts in memory),
    ]


def markdown(rows: list[list[str]]) -> str:
    """Return a table. The first row is the heading. The first column is left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        + " |"
        for row in rows
    ]  # fmt: skip
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
