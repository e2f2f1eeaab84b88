"""The rank x step grid that error messages show, as text."""

from collections.abc import Collection, Sequence

from .actions import Step

Cell = tuple[int, int]
"""A position in the grid: the rank, and the index in its list."""

_AROUND = 5  # steps of a long grid that are shown before and after the marked cells


class ScheduleError(ValueError):
    """An invalid schedule. The message ends with the rank x step grid, with the invalid cells marked `>like this<`."""


def grid(rows: Sequence[Sequence[Step]], marked: Collection[Cell] = ()) -> str:
    """Return the steps as text, one line per rank.

    A long grid is cut to the columns near the `marked` cells, or to the first ones.
    """
    length, marked = max(map(len, rows), default=0), {*marked}
    first, last = 0, length
    if length > 4 * _AROUND:
        columns = [step for _, step in marked] or [0]
        first, last = max(0, min(columns) - _AROUND), min(length, max(columns) + _AROUND + 1)
    label = max(len(f"rank {len(rows) - 1}"), 7) + 1
    cells = [
        [f">{row[i]}<" if (rank, i) in marked else str(row[i]) for i in range(first, min(last, len(row)))]
        for rank, row in enumerate(rows)
    ]
    widths = [max((len(row[i]) for row in cells if i < len(row)), default=0) for i in range(last - first)]
    lines = [] if (first, last) == (0, length) else [f"steps {first} to {last - 1} of {length}:"]
    for rank, row in enumerate(cells):
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"rank {rank}".ljust(label) + " ".join(padded))
    return "\n".join(lines)
