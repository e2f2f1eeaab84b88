"""Pictures of `moe-dualpipe plan`: where the time of a step goes, and step time against memory of all candidates."""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from ..drawing.figures import new_figure, plain_text, save_figure
from .layout_search import Found
from .prediction import Estimate
from .workload import Workload, layout_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY = "#3b75af", "#e1812c", "#8c8c8c"
SLOWEST = 3
"""Candidates that take so many times as long as the best are not drawn."""


def save_waterfall(found: Estimate, path: Path) -> None:
    """Draw the waterfall from the ideal to the predicted step. Effects of less than 0.1% of the step are left out.

    Raises ImportError if matplotlib is not installed.
    """
    parts = [(name, seconds) for name, seconds in found.waterfall() if abs(seconds) >= 1e-3 * found.seconds]
    figure = new_figure(8.5, 0.42 * len(parts) + 1.6)
    axes = figure.subplots()
    before = 0.0
    for row, (_, seconds) in enumerate(parts):
        color = BLUE if row == 0 else ORANGE if seconds > 0 else GREY
        axes.barh(row, seconds, left=before, color=color, height=0.7)
        before += seconds
        text = f"{seconds:.3g} s" if row == 0 else f"{seconds:+.2g} s"
        axes.text(max(before, before - seconds), row, f" {text}", va="center", fontsize=8)
        if row + 1 < len(parts):
            axes.plot([before, before], [row - 0.35, row + 1.35], color=GREY, linewidth=0.7)
    low, high = found.interval
    last = len(parts)
    axes.barh(last, found.seconds, color=BLUE, height=0.7)
    axes.errorbar(found.seconds, last, xerr=[[found.seconds - low], [high - found.seconds]], color="black", capsize=3)
    axes.text(high, last, f"  {found.seconds:.3g} s ({low:.3g} to {high:.3g})", va="center", fontsize=8)
    axes.set_yticks(range(last + 1), [*(name for name, _ in parts), "predicted step"])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * max(high, found.seconds))
    _finish(figure, found.load, f": {layout_text(found.load.layout)}", "seconds of a step", path)


def save_candidates(found: Found, path: Path) -> None:
    """Draw the step time and the memory of each candidate; the best is marked, and the limit of the memory.

    Those that are not simulated are smaller. The axis ends at three times the best step: a note counts the slower ones.
    """
    figure = new_figure(8, 5)
    axes = figure.subplots()
    factor, best = found.best.constant.factor, found.ranked[0]
    shown = [one for one in found.ranked if one.seconds <= SLOWEST * best.seconds]
    for i, schedule in enumerate(sorted({one.load.schedule for one in shown})):
        own = [one for one in shown if one.load.schedule == schedule]
        axes.scatter([one.memory_gb for one in own], [one.seconds * factor for one in own], label=schedule,
                     s=[28 if one.simulated else 8 for one in own], color=f"C{i}")  # fmt: skip
    if slower := len(found.ranked) - len(shown):
        axes.text(1, -0.14, f"{slower} slower ones are not shown", transform=axes.transAxes, ha="right", fontsize=8)
    left = best.memory_gb > statistics.fmean(axes.get_xlim())  # on which side of the point there is room
    axes.annotate(layout_text(best.load.layout), (best.memory_gb, best.seconds * factor), (-8 if left else 8, -6),
                  va="top", textcoords="offset points", ha="right" if left else "left", fontsize=8)  # fmt: skip
    axes.scatter([best.memory_gb], [best.seconds * factor], s=140, facecolors="none", edgecolors="black")
    device = best.load.device
    axes.axvline(device.memory_gb, color=GREY, linestyle="--", linewidth=1)
    limit = f"{device.name}: {device.memory_gb:.0f} GB "
    axes.text(device.memory_gb, axes.get_ylim()[1], limit, ha="right", va="top", fontsize=8, color=GREY)
    axes.set_ylabel("predicted seconds of a step")
    axes.legend(frameon=False, fontsize=8)
    _finish(figure, best.load, "", "peak memory of the fullest GPU, GB", path)


def _finish(figure: "Figure", load: Workload, more: str, across: str, path: Path) -> None:
    """Add title and label, and save the figure."""
    (axes,) = figure.axes
    axes.set_xlabel(across)
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{load.shape.name}, {load.layout.num_ranks} x {load.device.name}{more}"
    axes.set_title(plain_text(title), fontsize=10, loc="left")
    save_figure(figure, path)
