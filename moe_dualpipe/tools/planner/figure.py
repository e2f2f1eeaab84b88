"""The picture of `moe-dualpipe plan search`: step time against memory of all candidates."""

import statistics
from pathlib import Path

from ..drawing.figures import new_figure, plain_text, save_figure
from .layout_search import Found
from .workload import layout_text

GREY = "#8c8c8c"
SLOWEST = 3
"""Candidates that take so many times as long as the best are not drawn."""


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
    axes.set_xlabel("peak memory of the fullest GPU, GB")
    axes.spines[["top", "right"]].set_visible(False)
    title = f"{best.load.shape.name}, {best.load.layout.num_ranks} x {device.name}"
    axes.set_title(plain_text(title), fontsize=10, loc="left")
    save_figure(figure, path)
