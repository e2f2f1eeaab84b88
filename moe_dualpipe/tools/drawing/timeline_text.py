"""A timeline as text for a terminal."""

from bisect import bisect_right
from math import floor
from operator import itemgetter
from textwrap import wrap

from ...messages import printable
from ...schedule.timeline import Timeline
from .captions import format_number, timeline_summary, timeline_title
from .timeline_boxes import LABELS, Box, boxes, has_pairs, letters, shortest

_MOST_BANDS = 60


def timeline_text(timeline: Timeline, width: int = 80) -> str:
    """Return the timeline in lines of at most `width` (at least 40) characters. A long one has several bands.

    A letter precedes the number of a micro-batch, as in `F3`: lowercase for all stages of the rank but its first.
    Brackets enclose a pair, dots are idle time. A box that spans two bands has one label, in its middle.
    """
    ranks = range(timeline.schedule.num_ranks)
    label = len(f"rank {ranks[-1]}  ")
    width = max(width, 40)
    columns = width - label
    digits = len(str(timeline.schedule.num_micro_batches - 1))
    least = digits + 4  # a bracket, a letter and a blank
    start, makespan = float(timeline.start), float(timeline.makespan)
    scale = min(least / shortest(timeline), _MOST_BANDS * columns / makespan)

    def column(time: float) -> int:
        return floor((time - start) * scale + 0.5)

    end = column(start + makespan)
    rows = [[(column(box.start), column(box.end), box) for box in boxes(timeline, rank)] for rank in ranks]
    lines = wrap(printable(timeline_title(timeline)), width)
    for first in range(0, end, columns):
        last = min(first + columns, end)
        lines.append(f"{'time':<{label}}{format_number(start + first / scale)}")
        for rank in ranks:
            row, at = "", first
            for left, right, box in rows[rank][bisect_right(rows[rank], first, key=itemgetter(1)) :]:
                if left >= last:
                    break
                if left < right:
                    shown = range(max(left, first), min(right, last))
                    marks = _marks(timeline, rank, box, range(left, right), shown)
                    row += "." * (shown.start - at) + marks
                    at = shown.stop
            lines.append(f"{f'rank {rank}':<{label}}{row}{'.' * (last - at)}")
    lines += ["", *_legend(timeline, width)]
    lines += [part for line in timeline_summary(timeline).splitlines() for part in wrap(line, width)]
    return "\n".join(lines)


def _marks(timeline: Timeline, rank: int, box: Box, whole: range, shown: range) -> str:
    """Return the text of a box that fills the columns `whole`, cut to `shown`. Its last column is a blank."""
    first_stage = box.stage == timeline.schedule.placement.stages[rank][0]
    letter = box.letter if first_stage else box.letter.lower()
    opening = "[" if box.framed and box.letter == "F" and shown.start == whole.start else ""
    closing = "]" if box.framed and box.letter == "B" and shown.stop == whole.stop else ""
    size = len(shown) - (shown.stop == whole.stop and len(shown) > 1)
    room = max(size - len(opening + closing), 0)
    name = f"{letter}{box.micro_batch}" if (whole.start + whole.stop - 1) // 2 in shown else ""
    inside = (opening + (name if len(name) <= room else "").center(room) + closing)[:size]
    return inside + " " * (len(shown) - size)


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
