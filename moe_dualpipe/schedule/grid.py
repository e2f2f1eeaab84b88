"""The rank x step grid that error messages show, as text."""

from collections.abc import Collection, Sequence

from .actions import Step

Cell = tuple[int, int]
"""A position in the grid: the rank, and the index in its list."""

_AROUND = 5  # steps and ranks of a large grid that are shown before and after the marked cells
_MOST = 64  # of either that are shown


class ScheduleError(ValueError):
    """An invalid schedule. The message ends with the rank x step grid, with the invalid cells marked `>like this<`."""


def grid(rows: Sequence[Sequence[Step]], marked: Collection[Cell] = ()) -> str:
    """Return the steps as text, one line per rank.

    A large grid is cut to the ranks and steps near the `marked` cells, or to the first ones.
    """
    length, marked = max(map(len, rows), default=0), {*marked}
    ranks, steps = _shown(len(rows), [rank for rank, _ in marked]), _shown(length, [step for _, step in marked])
    label = max(len(f"rank {ranks[-1]}") if ranks else 0, 7) + 1
    cells = [
        [f">{rows[rank][i]}<" if (rank, i) in marked else str(rows[rank][i]) for i in steps if i < len(rows[rank])]
        for rank in ranks
    ]
    widths = [max((len(row[i]) for row in cells if i < len(row)), default=0) for i in range(len(steps))]
    shown = (("ranks", ranks, len(rows)), ("steps", steps, length))
    parts = [f"{name} {some[0]} to {some[-1]} of {all_}" for name, some, all_ in shown if len(some) < all_]
    lines = [f"{', '.join(parts)}:"] if parts else []
    for rank, row in zip(ranks, cells, strict=True):
        padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=False))
        lines.append(f"rank {rank}".ljust(label) + " ".join(padded))
    return "\n".join(lines)


def _shown(length: int, marked: Sequence[int]) -> range:
    """The steps, or the ranks, of a grid with this many that are shown."""
    if length <= 4 * _AROUND:
        return range(length)
    first = max(0, min(marked, default=0) - _AROUND)
    return range(first, min(length, max(marked, default=0) + _AROUND + 1, first + _MOST))
