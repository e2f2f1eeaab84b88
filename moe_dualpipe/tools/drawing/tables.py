"""Markdown tables."""

from ...messages import plural, printable
from ...schedule.compare import ComparedSchedule
from .captions import format_number, format_range

HEADINGS = ("stages", "step time", "least", "bubble per rank", "share", "activations", "deferred W", "parameters")


def comparison_table(entries: tuple[ComparedSchedule, ...]) -> str:
    """Return one table per number of ranks, each followed by the reasons why some schedules cannot run."""
    tables = []
    for num_ranks in dict.fromkeys(entry.num_ranks for entry in entries):
        here = [entry for entry in entries if entry.num_ranks == num_ranks]
        heading = f"on {plural(num_ranks, 'rank')}"
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
        str(timeline.schedule.num_stages), format_number(timeline.makespan), format_number(entry.least),
        format_range(timeline.bubble), f"{timeline.bubble_share:.1%}",
        *(format_number(max(entry.in_model_stages(counts))) for counts in memory),
    ]  # fmt: skip


def markdown(rows: list[list[str]]) -> str:
    """Return a table. The first row is the heading. The first column is left-aligned, the others right-aligned.

    Cells may hold names from files.
    """
    rows = [[printable(cell, 100).replace("|", "\\|") for cell in row] for row in rows]
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = []
    for name, *numbers in rows:
        cells = [name.ljust(first), *(cell.rjust(width) for cell, width in zip(numbers, others, strict=True))]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|" + "|".join(["-" * (first + 2), *("-" * (width + 1) + ":" for width in others)]) + "|")
    return "\n".join(lines)
