"""Draw a timeline: as text for a terminal, or as a figure (SVG, PNG) in the manner of DeepSeek's.

Forwards are orange, backwards green, weight gradients alone blue; what a rank runs as a pair stands in one frame; the
number in a box is the micro-batch. A rank's further stages, or the other flow, have paler colours.
"""

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import floor
from operator import itemgetter
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from .actions import Backward, Forward, Overlap
from .schedule import Schedule
from .timeline import Timeline
from .trace import write_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"F": "#f6b26b", "B": "#93c47d", "I": "#bcd86a", "W": "#6fa8dc"}
NAMES = {"F": "forward", "B": "backward", "I": "input half", "W": "weight half"}
SUFFIXES = (".svg", ".png", ".json", ".csv")

_FORWARD_SHARE = 1 / 3
"""How much of a pair's frame its forward gets; nothing says where inside of it the one or the other runs."""
_MOST_INCHES, _MOST_BANDS = 60, 60


@dataclass(frozen=True, slots=True)
class Box:
    """What is drawn for an action, or for one half of a pair."""

    start: float
    end: float
    letter: str
    stage: int
    micro_batch: int
    framed: bool = False


def boxes(timeline: Timeline, rank: int) -> Iterator[Box]:
    """The boxes of `rank`, from left to right; the two halves of a pair follow each other."""
    for span in timeline.spans[rank]:
        start, end = float(span.start), float(span.end)
        match span.action:
            case Overlap(forward, backward):
                middle = start + (end - start) * _FORWARD_SHARE
                yield Box(start, middle, "F", forward.stage, forward.micro_batch, framed=True)
                yield Box(middle, end, "B", backward.stage, backward.micro_batch, framed=True)
            case Forward(stage, micro_batch):
                yield Box(start, end, "F", stage, micro_batch)
            case Backward(stage, micro_batch, part):
                yield Box(start, end, part.value, stage, micro_batch)


def summary(timeline: Timeline) -> str:
    """Two lines: the time of a step and what of it is bubble; what the fullest rank holds, in the schedule's stages."""
    deferred = max(timeline.peak_deferred)
    return (
        f"step {number(timeline.makespan)}, bubble {span_of(timeline.bubble)} a rank ({timeline.bubble_share:.1%})\n"
        f"at most: activations of {_count(max(timeline.peak_activations), 'micro-batch', 'es')}, "
        + (f"{deferred} deferred W, " if deferred else "")
        + f"parameters of {_count(max(timeline.parameters), 'stage')}"
    )


def title(timeline: Timeline) -> str:
    return f"{timeline.schedule.name}: {sizes(timeline.schedule)}"


def sizes(schedule: Schedule) -> str:
    """`4 ranks, 8 stages, 16 micro-batches`."""
    micro_batches = _count(schedule.num_micro_batches, "micro-batch", "es")
    return f"{_count(schedule.num_ranks, 'rank')}, {_count(schedule.num_stages, 'stage')}, {micro_batches}"


def _count(number: int, noun: str, ending: str = "s") -> str:
    return f"{number} {noun}{ending if number != 1 else ''}"


def number(value: float) -> str:
    """Six digits, or all of a larger number; never an exponent for a large one."""
    return f"{float(value):.0f}" if abs(value) >= 1e6 else f"{float(value):g}"


def span_of(values: tuple[float, ...]) -> str:
    """`5`, or `4 to 5` where ranks differ by more than rounding."""
    least, most = number(min(values)), number(max(values))
    return least if least == most else f"{least} to {most}"


def save(timeline: Timeline, path: str | Path) -> None:
    """Write what the suffix says: .svg or .png a figure, .json a Chrome trace, .csv the order.

    Raises ValueError for another suffix, ImportError where a figure is wanted and matplotlib is not installed.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".svg" | ".png":
            figure = draw(timeline)
            with _reproducible():
                figure.savefig(path, dpi=130, metadata={"Date": None} if path.suffix.lower() == ".svg" else None)
        case ".json":
            write_trace(timeline, path)
        case ".csv":
            path.write_text(timeline.schedule.to_csv())
        case _:
            raise ValueError(f"cannot write {path.name!r}: use one of {', '.join(SUFFIXES)}")


# ---- Figures ----


def draw(timeline: Timeline) -> "Figure":
    """A figure of the whole timeline, wide enough for its micro-batch numbers to be read (up to 60 inches)."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'moe-dualpipe[viz]'") from error
    width = max(6.5, float(timeline.makespan) * _inches(timeline) + 1)
    figure = Figure(figsize=(min(width, _MOST_INCHES), 1.3 + 0.3 * timeline.schedule.num_ranks), layout="constrained")
    axes = figure.add_subplot()
    draw_on(axes, timeline, font_size=7 * min(1, _MOST_INCHES / width))
    axes.set_title(f"{title(timeline)}\n{summary(timeline)}", fontsize=9, loc="left")
    add_legend(axes, timeline)
    return figure


def draw_on(axes: "Axes", timeline: Timeline, font_size: float = 7) -> None:
    """Draw one row for each rank; time goes to the right.

    No numbers are drawn below a font size of 3, and in boxes that are far shorter than the others.
    """
    shortest = _shortest(timeline)
    edge = font_size / 8 if font_size >= 3 else 0  # nothing of a box of a few dots would be left between wider ones
    ranks = range(timeline.schedule.num_ranks)
    for rank in ranks:
        row = list(boxes(timeline, rank))
        colours = [_shade(timeline, rank, box) for box in row]
        ranges = [(box.start, box.end - box.start) for box in row]
        axes.broken_barh(ranges, (-rank - 0.43, 0.86), facecolors=colours, edgecolors="white", linewidths=edge)
        frames = [(float(s.start), float(s.duration)) for s in timeline.spans[rank] if isinstance(s.action, Overlap)]
        axes.broken_barh(frames, (-rank - 0.43, 0.86), facecolors="none", edgecolors="black", linewidths=edge, zorder=2)
        for box in row if font_size >= 3 else ():
            if box.end - box.start >= shortest * 0.99:
                middle = (box.start + box.end) / 2
                axes.text(middle, -rank, str(box.micro_batch), ha="center", va="center_baseline", fontsize=font_size)
    axes.set_xlim(float(timeline.start), float(timeline.start + timeline.makespan))
    axes.set_ylim(-len(ranks) + 0.45, 0.55)
    axes.set_yticks([-rank for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.set_frame_on(False)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("time", fontsize=8, loc="right", labelpad=1)


def _inches(timeline: Timeline) -> float:
    """How wide a unit of time must be, so that every number fits into its box."""
    digits = len(str(timeline.schedule.num_micro_batches - 1))
    return (0.05 + 0.065 * digits) / _shortest(timeline)


def _shortest(timeline: Timeline) -> float:
    """The shortest box that has to hold its number: one of less than a quarter of the median need not."""
    every = (box.end - box.start for rank in range(timeline.schedule.num_ranks) for box in boxes(timeline, rank))
    durations = sorted(duration for duration in every if duration > 0)
    return max(durations[0], durations[len(durations) // 2] / 4)


def add_legend(axes: "Axes", timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    letters = {box.letter for rank in range(timeline.schedule.num_ranks) for box in boxes(timeline, rank)}
    entries = [Patch(facecolor=COLOURS[letter], label=NAMES[letter]) for letter in COLOURS if letter in letters]
    if any(isinstance(span.action, Overlap) for spans in timeline.spans for span in spans):
        entries.append(Patch(facecolor="white", edgecolor="black", label="overlapped pair"))
    if max(timeline.parameters) > 1:
        entries.append(Patch(facecolor=_paler(COLOURS["F"], 0.5), label="pale: the rank's other stages"))
    below = (0, -0.25 / len(timeline.spans))
    axes.legend(handles=entries, loc="upper left", bbox_to_anchor=below, ncols=len(entries), fontsize=8, frameon=False)


def _shade(timeline: Timeline, rank: int, box: Box) -> str:
    """The colour of the action, paler for each further stage that the rank holds."""
    stages = timeline.schedule.placement.stages[rank]
    return _paler(COLOURS[box.letter], 0.5 * stages.index(box.stage) / max(1, len(stages) - 1))


def _paler(colour: str, towards_white: float) -> str:
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * towards_white):02x}" for part in parts)


def _reproducible() -> AbstractContextManager[None]:
    """SVG with text as text, and the same bytes every time."""
    from matplotlib import rc_context

    return rc_context({"svg.fonttype": "none", "svg.hashsalt": "moe-dualpipe"})


# ---- Text ----


def text(timeline: Timeline, width: int = 80, colour: bool = True) -> str:
    """The timeline in lines of at most `width` characters (but at least 40), time going on in the next band of lines.

    With `colour`, boxes are coloured (ANSI, 24 bit) and hold the micro-batch; otherwise it follows a letter, as in
    `F3`, small for the rank's further stages. A pair stands in brackets, a dot is time in which the rank waits. What
    runs on into the next band is named where its middle is.
    """
    ranks = range(timeline.schedule.num_ranks)
    label = len(f"rank {ranks[-1]}  ")
    columns = max(width, 40) - label
    digits = len(str(timeline.schedule.num_micro_batches - 1))
    least = digits + (3 if colour else 4)  # a bracket and a blank, and the letter
    start, makespan = float(timeline.start), float(timeline.makespan)
    scale = min(least / _shortest(timeline), _MOST_BANDS * columns / makespan)

    def column(time: float) -> int:
        return floor((time - start) * scale + 0.5)

    end = column(start + makespan)
    rows = [[(column(box.start), column(box.end), box) for box in boxes(timeline, rank)] for rank in ranks]
    lines = wrap(title(timeline), max(width, 40))
    for first in range(0, end, columns):
        last = min(first + columns, end)
        lines.append(f"{'time':<{label}}{number(start + first / scale)}")
        for rank in ranks:
            row, at = "", first
            for left, right, box in rows[rank][bisect_right(rows[rank], first, key=itemgetter(1)) :]:
                if left >= last:
                    break
                if left < right:
                    shown = range(max(left, first), min(right, last))
                    marks = _marks(timeline, rank, box, range(left, right), shown, colour)
                    row += _waiting(shown.start - at, colour) + marks
                    at = shown.stop
            lines.append(f"{f'rank {rank}':<{label}}{row}{_waiting(last - at, colour)}")
    lines += ["", *_key(timeline, max(width, 40), colour)]
    lines += [part for line in summary(timeline).splitlines() for part in wrap(line, max(width, 40))]
    return "\n".join(lines)


def _marks(timeline: Timeline, rank: int, box: Box, whole: range, shown: range, colour: bool) -> str:
    """The columns `shown` of a box that has the columns `whole`, the last of which is blank between it and the next."""
    first_stage = box.stage == timeline.schedule.placement.stages[rank][0]
    letter = "" if colour else box.letter if first_stage else box.letter.lower()
    opening = "[" if box.framed and box.letter == "F" and shown.start == whole.start else ""
    closing = "]" if box.framed and box.letter == "B" and shown.stop == whole.stop else ""
    size = len(shown) - (shown.stop == whole.stop and len(shown) > 1)
    room = max(size - len(opening + closing), 0)
    name = f"{letter}{box.micro_batch}" if (whole.start + whole.stop - 1) // 2 in shown else ""
    inside = (opening + (name if len(name) <= room else "").center(room) + closing)[:size]
    gap = " " * (len(shown) - size)
    return (_painted(inside, _shade(timeline, rank, box)) if colour else inside) + gap


def _waiting(width: int, colour: bool) -> str:
    return f"\x1b[2m{'.' * width}\x1b[0m" if colour and width else "." * width


def _key(timeline: Timeline, width: int, colour: bool) -> list[str]:
    """What the marks mean, in lines of at most `width` characters."""
    every = [box for rank in range(timeline.schedule.num_ranks) for box in boxes(timeline, rank)]
    entries = []  # how long it looks, and what is written
    for letter in (letter for letter in COLOURS if any(box.letter == letter for box in every)):
        mark = f" {letter} " if colour else letter
        length = len(f"{mark} {NAMES[letter]}")
        entries.append((length, f"{_painted(mark, COLOURS[letter]) if colour else mark} {NAMES[letter]}"))
    others = ["small: other stages"] if not colour and max(timeline.parameters) > 1 else []
    others += ["[ ] pair"] if any(box.framed for box in every) else []
    entries += [(len(other), other) for other in [*others, ". waits"]]
    lines, used = [""], 0
    for length, written in entries:
        if used and used + 3 + length > width:
            lines.append("")
            used = 0
        lines[-1] += ("   " if used else "") + written
        used += (3 if used else 0) + length
    return lines


def _painted(text: str, colour: str) -> str:
    rgb = ";".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
    return f"\x1b[38;2;0;0;0m\x1b[48;2;{rgb}m{text}\x1b[0m"
