"""Tables in Markdown."""

from ..schedule.compare import ComparedSchedule
from .timeline_boxes import format_number, format_range

HEADINGS = ("stages", "step time", "bubble per rank", "share", "activations", "deferred W", "parameters")


def comparison_table(entries: tuple[ComparedSchedule, ...]) -> str:
    """Markdown: a table for each number of ranks, and below it what each schedule lacks that cannot run there."""
    tables = []
    for num_ranks in dict.fromkeys(entry.num_ranks for entry in entries):
        here = [entry for entry in entries if entry.num_ranks == num_ranks]
        heading = f"on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        tables.append(markdown([[heading, *HEADINGS], *([entry.name, *_cells(entry)] for entry in here)]))
        if problems := [f"- {entry.problem}" for entry in here if entry.problem]:
            tables.append("\n".join(problems))
    return "\n\n".join(tables)


def _cells(entry: ComparedSchedule) -> list[str]:
    """What stands in the table under HEADINGS, for the fullest rank."""
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
    """A table whose first row is its heading; the first column is aligned to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "| " + " | ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
        + " |"
        for row in rows
    ]  # fmt: skip
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (w + 1) + ":" for w in widths[1:])]) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])
