"""A timeline as text for a terminal."""

from math import floor
from textwrap import wrap

from ...messages import printable
from ...schedule.timeline import Timeline
from .tables import format_number
from .timeline import LABELS, boxes, has_pairs, letters, shortest, timeline_summary, timeline_title

_MOST_BANDS = 60


def timeline_text(timeline: Timeline, width: int = 80) -> str:
    """Return the timeline in lines of at most `width` (at least 40) characters. A long one has several bands.

    A letter precedes the number of a micro-batch, as in `F3`: lowercase for all stages of the rank but its first.
    Brackets enclose a pair, dots are idle time.
    """
    width, ranks = max(width, 40), range(timeline.schedule.num_ranks)
    margin = len(f"rank {ranks[-1]}  ")
    columns = width - margin
    least = len(str(timeline.schedule.num_micro_batches - 1)) + 4  # a bracket, a letter and a blank
    start, makespan = float(timeline.start), float(timeline.makespan)
    scale = min(least / shortest(timeline), _MOST_BANDS * columns / makespan)
    rows = [_row(timeline, rank, scale) for rank in ranks]
    lines = wrap(printable(timeline_title(timeline)), width)
    for first in range(0, len(rows[0]), columns):
        lines.append(f"{'time':<{margin}}{format_number(start + first / scale)}")
        lines += [f"{f'rank {rank}':<{margin}}{row[first : first + columns]}" for rank, row in enumerate(rows)]
    lines += ["", *_legend(timeline, width)]
    lines += [part for line in timeline_summary(timeline).splitlines() for part in wrap(line, width)]
    return "\n".join(lines)


def _row(timeline: Timeline, rank: int, scale: float) -> str:
    """Return all boxes of a rank. scale: columns per unit of time."""

    def column(time: float) -> int:
        return floor((time - float(timeline.start)) * scale + 0.5)

    row, own = "", timeline.schedule.placement.stages[rank][0]
    for box in boxes(timeline, rank):
        row = row.ljust(column(box.start), ".")
        letter = box.letter if box.stage == own else box.letter.lower()
        opening, closing = "[" * (box.framed and box.letter == "F"), "]" * (box.framed and box.letter == "B")
        size = column(box.end) - len(row) - 1  # the last column is a blank
        room = max(size - len(opening + closing), 0)
        name = f"{letter}{box.micro_batch}"
        inside = f"{opening}{(name if len(name) <= room else '').center(room)}{closing}"
        row += f"{inside[: max(size, 0)]} "[: max(size + 1, 0)]
    return row.ljust(column(float(timeline.start + timeline.makespan)), ".")


def _legend(timeline: Timeline, width: int) -> list[str]:
    """Return the legend, in lines of at most `width` characters."""
    entries = [f"{letter} {LABELS[letter]}" for letter in letters(timeline)]
    entries += ["lowercase: other stages"] if max(timeline.parameters) > 1 else []
    entries += ["[ ] pair"] if has_pairs(timeline) else []
    lines = [""]
    for entry in [*entries, ". idle"]:
        if lines[-1] and len(lines[-1]) + 3 + len(entry) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + entry
    return lines
