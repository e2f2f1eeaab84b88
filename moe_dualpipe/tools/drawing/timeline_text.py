"""A timeline as text for a terminal."""

from bisect import bisect_right
from math import floor
from operator import itemgetter
from textwrap import wrap

from ...messages import printable
from ...schedule.timeline import Timeline
from .captions import format_number, timeline_summary, timeline_title
from .timeline_boxes import COLORS, LABELS, Box, boxes, has_pairs, letters, shade, shortest

_MOST_BANDS = 60


def timeline_text(timeline: Timeline, width: int = 80, color: bool = True) -> str:
    """Return the timeline in lines of at most `width` (at least 40) characters. A long one has several bands.

    With `color`, a box is colored (24-bit ANSI) and holds the number of its micro-batch. Otherwise a letter precedes
    the number, as in `F3`: lowercase for all stages of the rank but its first. Brackets enclose a pair, dots are idle
    time. A box that spans two bands has one label, in its middle.
    """
    ranks = range(timeline.schedule.num_ranks)
    label = len(f"rank {ranks[-1]}  ")
    width = max(width, 40)
    columns = width - label
    digits = len(str(timeline.schedule.num_micro_batches - 1))
    least = digits + (3 if color else 4)  # a bracket, a blank, and without color a letter
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
                    marks = _marks(timeline, rank, box, range(left, right), shown, color)
                    row += _idle(shown.start - at, color) + marks
                    at = shown.stop
            lines.append(f"{f'rank {rank}':<{label}}{row}{_idle(last - at, color)}")
    lines += ["", *_legend(timeline, width, color)]
    lines += [part for line in timeline_summary(timeline).splitlines() for part in wrap(line, width)]
    return "\n".join(lines)


def _marks(timeline: Timeline, rank: int, box: Box, whole: range, shown: range, color: bool) -> str:
    """Return the text of a box that fills the columns `whole`, cut to `shown`. Its last column is a blank."""
    first_stage = box.stage == timeline.schedule.placement.stages[rank][0]
    letter = "" if color else box.letter if first_stage else box.letter.lower()
    opening = "[" if box.framed and box.letter == "F" and shown.start == whole.start else ""
    closing = "]" if box.framed and box.letter == "B" and shown.stop == whole.stop else ""
    size = len(shown) - (shown.stop == whole.stop and len(shown) > 1)
    room = max(size - len(opening + closing), 0)
    name = f"{letter}{box.micro_batch}" if (whole.start + whole.stop - 1) // 2 in shown else ""
    inside = (opening + (name if len(name) <= room else "").center(room) + closing)[:size]
    gap = " " * (len(shown) - size)
    return (_painted(inside, shade(timeline, rank, box)) if color else inside) + gap


def _idle(width: int, color: bool) -> str:
    return f"\x1b[2m{'.' * width}\x1b[0m" if color and width else "." * width


def _legend(timeline: Timeline, width: int, color: bool) -> list[str]:
    """Return the legend, in lines of at most `width` characters."""
    entries = []  # visible length, text with ANSI codes
    for letter in letters(timeline):
        mark = f" {letter} " if color else letter
        painted = _painted(mark, COLORS[letter]) if color else mark
        entries.append((len(f"{mark} {LABELS[letter]}"), f"{painted} {LABELS[letter]}"))
    others = ["lowercase: other stages"] if not color and max(timeline.parameters) > 1 else []
    others += ["[ ] pair"] if has_pairs(timeline) else []
    lines, used = [""], 0
    for length, written in [*entries, *((len(other), other) for other in [*others, ". idle"])]:
        if used and used + 3 + length > width:
            lines, used = [*lines, ""], 0
        lines[-1] += ("   " if used else "") + written
        used += (3 if used else 0) + length
    return lines


def _painted(text: str, color: str) -> str:
    return f"\x1b[38;2;0;0;0m\x1b[48;2;{';'.join(map(str, bytes.fromhex(color[1:])))}m{text}\x1b[0m"
