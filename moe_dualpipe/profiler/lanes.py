"""A trace as a picture: what computed, above what communicated, in the manner of DeepSeek's published profile.

A block is what one annotation launched; its colour says whether that belongs to a forward (F), a backward (B) or a
weight gradient (W), by the letter in brackets at the end of its name. Work without an annotation is grey.
"""

import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

from ..schedule.figure import figure_class
from ..schedule.picture import COLOURS
from .analyze import COMMUNICATION, Analysis, intervals_of, kind_of
from .chrome import Mark, Trace, Work
from .intervals import Intervals, total, union
from .report import verdict

LANES = ("computation", "communication")
_MOST_LABELS = 400


class Block(NamedTuple):
    lane: int
    name: str
    colour: str
    intervals: Intervals
    """Microseconds from the first work on the device."""


def blocks(trace: Trace, device: str, pattern: re.Pattern[str] = COMMUNICATION) -> list[Block]:
    """What ran on `device`, by the lane it belongs to and the annotation that launched it, in order of time."""
    works: dict[tuple[int, Mark | None], list[Work]] = defaultdict(list)
    for work in trace.work:
        if work.device == device:
            lane = int(kind_of(work, pattern) == "comm")
            works[lane, trace.annotation_of(work)].append(work)
    start = min((work.start for same in works.values() for work in same), default=0.0)
    found = [
        Block(lane, mark.name if mark else "", _colour(mark.name if mark else ""), union(intervals_of(same)) - start)
        for (lane, mark), same in works.items()
    ]
    return sorted(
        (block for block in found if len(block.intervals)), key=lambda block: (block.lane, *block.intervals[0])
    )


def save(trace: Trace, analysis: Analysis, path: Path, pattern: re.Pattern[str] = COMMUNICATION) -> None:
    """Draw the lanes of a device into a .png or .svg. Raises ImportError where matplotlib is not installed."""
    every = blocks(trace, analysis.device, pattern)
    figure = figure_class()(figsize=(16, 2.6), layout="constrained")
    axes = figure.add_subplot()
    for block in every:
        spans = [(start / 1e3, (end - start) / 1e3) for start, end in block.intervals.tolist()]
        axes.broken_barh(spans, (-block.lane - 0.43, 0.86), facecolors=block.colour, edgecolors="none")
    wide = [block for block in every if block.name and total(block.intervals) > analysis.window_us / 150]
    for block in wide if len(wide) <= _MOST_LABELS else ():
        longest = max(block.intervals.tolist(), key=lambda interval: interval[1] - interval[0])
        middle = sum(longest) / 2e3  # of what is in one piece
        axes.text(middle, -block.lane, block.name, ha="center", va="center", fontsize=6, rotation=90)
    axes.set_xlim(0, analysis.window_us / 1e3)
    axes.set_yticks([0, -1], LANES)
    axes.set_xlabel("ms", fontsize=8, loc="right", labelpad=1)
    axes.set_frame_on(False)
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(f"device {analysis.device}: {verdict(analysis)}", fontsize=9, loc="left")
    figure.savefig(path, dpi=130)


def _colour(name: str) -> str:
    letter = re.search(r"\(([FBW])\)$", name)
    return COLOURS[letter[1]] if letter else "#c8c8c8"
