"""A timeline as a figure, like those of DeepSeek: the number in a box is its micro-batch, a frame is a pair."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...schedule import Overlap, Timeline
from .figures import new_figure, plain_text, save_figure
from .timeline import (
    COLORS,
    LABELS,
    boxes,
    has_pairs,
    letters,
    paler,
    shade,
    shortest,
    timeline_summary,
    timeline_title,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMELINE_SUFFIXES = (".svg", ".png", ".csv")
_MOST_INCHES = 60


def save_timeline(timeline: Timeline, path: str | Path, until: float | None = None) -> None:
    """Save in the format of the suffix: a figure (.svg, .png) up to the time `until`, or the schedule alone (.csv).

    Raises ValueError for any other suffix, and ImportError for a figure if matplotlib is not installed.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".svg" | ".png":
            save_figure(timeline_figure(timeline, until), path)
        case ".csv":
            path.write_text(timeline.schedule.to_csv())
        case _:
            raise ValueError(f"cannot write {path.name!r}: use one of {', '.join(TIMELINE_SUFFIXES)}")


def timeline_figure(timeline: Timeline, until: float | None = None) -> "Figure":
    """Return a figure that is wide enough for the numbers in its boxes (at most 60 inches).

    until: the time at its right end. Figures with the same `until` have the same width, and so the same scale.
    """
    width, font_size = size_for_numbers(timeline, width=6.5, font_size=7)
    figure = new_figure(8 if until else width, 1.3 + 0.3 * timeline.schedule.num_ranks)
    axes = figure.add_subplot()
    draw_timeline(axes, timeline, font_size)
    if until:
        axes.set_xlim(right=float(timeline.start) + until)
    axes.set_title(f"{plain_text(timeline_title(timeline))}\n{timeline_summary(timeline)}", fontsize=9, loc="left")
    add_timeline_legend(axes, timeline)
    return figure


def draw_timeline(axes: "Axes", timeline: Timeline, font_size: float = 7) -> None:
    """Draw one row per rank. Time runs to the right.

    Numbers are left out below a font size of 3, and in boxes that are much shorter than most.
    """
    least = shortest(timeline)
    edge = font_size / 8 if font_size >= 3 else 0  # white edges would hide boxes of a few pixels
    ranks = range(timeline.schedule.num_ranks)
    for rank in ranks:
        row = list(boxes(timeline, rank))
        colors = [shade(timeline, rank, box) for box in row]
        ranges = [(box.start, box.end - box.start) for box in row]
        axes.broken_barh(ranges, (-rank - 0.43, 0.86), facecolors=colors, edgecolors="white", linewidths=edge)
        frames = [(float(s.start), float(s.duration)) for s in timeline.spans[rank] if isinstance(s.action, Overlap)]
        axes.broken_barh(frames, (-rank - 0.43, 0.86), facecolors="none", edgecolors="black", linewidths=edge, zorder=2)
        for box in row if font_size >= 3 else ():
            if box.end - box.start >= least * 0.99:
                middle = (box.start + box.end) / 2
                axes.text(middle, -rank, str(box.micro_batch), ha="center", va="center_baseline", fontsize=font_size)
    axes.set_xlim(float(timeline.start), float(timeline.start + timeline.makespan))
    axes.set_ylim(-len(ranks) + 0.45, 0.55)
    axes.set_yticks([-rank for rank in ranks], [f"rank {rank}" for rank in ranks])
    axes.set_frame_on(False)
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("time", fontsize=8, loc="right", labelpad=1)


def size_for_numbers(timeline: Timeline, width: float, font_size: float) -> tuple[float, float]:
    """Return a width in inches (at least `width`) and a font size, so that every number fits into its box."""
    digits = len(str(timeline.schedule.num_micro_batches - 1))
    needed = float(timeline.makespan) * (0.05 + 0.065 * digits) / shortest(timeline) + 1
    return min(max(width, needed), _MOST_INCHES), font_size * min(1, _MOST_INCHES / needed)


def add_timeline_legend(axes: "Axes", timeline: Timeline) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=COLORS[letter], label=LABELS[letter]) for letter in letters(timeline)]
    if has_pairs(timeline):
        entries.append(Patch(facecolor="white", edgecolor="black", label="overlapped pair"))
    if max(timeline.parameters) > 1:
        entries.append(Patch(facecolor=paler(COLORS["F"], 0.5), label="paler: other stages"))
    below = (0, -0.25 / len(timeline.spans))
    columns = min(
        len(entries), int(axes.figure.bbox.width / axes.figure.dpi / 2)
    )  # the label of the axis is at its right end
    axes.legend(
        handles=entries, loc="upper left", bbox_to_anchor=below, ncols=columns, fontsize=8, frameon=False,
        handlelength=1.2, columnspacing=1.2,
    )  # fmt: skip
