"""Draw a trace as two lanes, computation above communication, like DeepSeek's published profiles.

A block is the work that one annotation launched. Its colour shows the letter at the end of the annotation's name: (F)
forward, (B) backward, (I) input gradient, (W) weight gradient. All other work is grey. If the trace is too long for
names to fit into the blocks, a second pair of lanes below shows a part of it with names.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np

from ..overlap.labels import letter_of
from ..profiler.files import LANES, LaneBlock
from ..profiler.intervals import total
from .figures import new_figure, plain_text, save_figure
from .overlap_report import hidden_sentence
from .page import close_gaps, write_page
from .timeline_boxes import COLOURS, LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..profiler.files import TraceFiles
    from ..profiler.measure import Measurement

SUFFIXES = (".png", ".svg", ".html")
OTHER = "#c8c8c8"
WIDTH, FONT_SIZE = 9.0, 9  # inches and points: the text is 11 pixels high in an image 800 pixels wide
_LANE_INCHES, _LETTER_INCHES = 7.7, 0.55 * FONT_SIZE / 72
_NAMED_SHARE = 0.9  # the detail is so short that names fit into blocks with this share of the named time

Window = tuple[float, float]


@dataclass(frozen=True)
class Picture:
    """Two lanes and their title. shift_us: how much later the lanes start than those of the first picture."""

    title: str
    blocks: Sequence[LaneBlock]
    shift_us: float = 0.0

    @property
    def end_us(self) -> float:
        return self.shift_us + max((float(block.intervals[-1, 1]) for block in self.blocks), default=0.0)

    @staticmethod
    def colour(block: LaneBlock) -> str:
        return COLOURS[letter] if (letter := letter_of(block.name)) else OTHER


def trace_pictures(files: "TraceFiles") -> list[Picture]:
    """Return one picture per device, on one time axis. If the ranks' clocks cannot be compared, each starts at 0."""
    known = [skew.shift_us for skew in files.skews if skew.shift_us is not None]
    shifts = [shift - min(known) for shift in known] if len(known) == len(files.skews) else [0.0] * len(files.skews)
    names = files.names if len(files.devices) > 1 else [files.devices[0].analysis.name]
    return [
        Picture(f"{name}: {hidden_sentence(device.analysis)}", device.blocks, shift)
        for name, device, shift in zip(names, files.devices, shifts, strict=True)
    ]


def measurement_pictures(measurement: "Measurement") -> list[Picture]:
    """Return the lanes of this rank in both runs."""
    rank = "rank 0, " if len(measurement.runs["overlapped"].devices) > 1 else ""
    return [
        Picture(f"{rank}{run}: {d.analysis.window_us / 1e3:,.1f} ms, {hidden_sentence(d.analysis)}", d.blocks)
        for run, files in measurement.runs.items()
        for d in files.devices[:1]
    ]


def save_lanes(pictures: Sequence[Picture], path: Path) -> None:
    """Save the pictures as an image (.png, .svg), or as a page to zoom into (.html).

    Raises ImportError for an image if matplotlib is not installed.
    """
    if path.suffix.lower() == ".html":
        write_page(pictures, path)
    else:
        save_figure(lanes_figure(pictures), path)


def lanes_figure(pictures: Sequence[Picture]) -> "Figure":
    """Draw the pictures below each other on one time axis. Raises ImportError if matplotlib is not installed."""
    windows = _windows(pictures)
    count = len(pictures) * len(windows)
    figure = new_figure(WIDTH, 0.4 + 1.2 * count)
    rows = figure.subplots(count, squeeze=False)[:, 0].reshape(len(pictures), len(windows))
    for (whole, *details), picture in zip(rows, pictures, strict=True):
        _draw(whole, picture, windows[0], names=not details)
        whole.set_title("\n".join(map(plain_text, wrap(picture.title, 115))), fontsize=FONT_SIZE, loc="left")
        for axes, window in zip(details, windows[1:], strict=True):
            _draw(axes, picture, window, names=True)
            start, end = (time / 1e3 for time in window)
            axes.set_title(f"the part in the frame, {end - start:,.3g} ms", fontsize=FONT_SIZE, loc="left")
            whole.broken_barh([(start, end - start)], (-1.47, 1.94), facecolors="none", edgecolors="black", zorder=3)
    _add_legend(figure, pictures)
    return figure


def _windows(pictures: Sequence[Picture]) -> list[Window]:
    """Return the whole time and, if names do not fit there, a detail from the middle of the time all pictures cover."""
    end = max(picture.end_us for picture in pictures)
    named = [(block.name, _longest(block, 0, end)) for picture in pictures for block in picture.blocks if block.name]
    lengths = np.array([stop - start for _, (start, stop) in named])
    if not lengths.sum():
        return [(0.0, end)]
    per_inch = lengths / [_LETTER_INCHES * (1 + len(name)) for name, _ in named]  # at most this many us per inch
    order = np.argsort(-per_inch)
    enough = np.searchsorted(np.cumsum(lengths[order]), _NAMED_SHARE * lengths.sum())
    length = float(_LANE_INCHES * per_inch[order][min(enough, len(order) - 1)])
    if length > 0.8 * end:
        return [(0.0, end)]
    middle = (max(picture.shift_us for picture in pictures) + min(picture.end_us for picture in pictures)) / 2
    start = min(max(middle - length / 2, 0.0), end - length)
    return [(0.0, end), (start, start + length)]


def _longest(block: LaneBlock, start: float, end: float) -> Window:
    """Return the longest piece of a block between `start` and `end`. Gaps too short to be seen do not end a piece."""
    pieces = close_gaps(block.intervals, (end - start) / 400).clip(start, end)
    left, right = pieces[np.argmax(pieces[:, 1] - pieces[:, 0])].tolist()
    return left, right


def _draw(axes: "Axes", picture: Picture, window: Window, names: bool) -> None:
    start, end = window[0] - picture.shift_us, window[1] - picture.shift_us
    inch = (end - start) / _LANE_INCHES
    for block in picture.blocks:
        bottom = -block.lane - 0.43
        shown = block.intervals[(block.intervals[:, 1] > start) & (block.intervals[:, 0] < end)].tolist()
        spans = [((a + picture.shift_us) / 1e3, (b - a) / 1e3) for a, b in shown]
        axes.broken_barh(spans, (bottom, 0.86), facecolors=picture.colour(block), edgecolors="none")
        if not (names and block.name):
            continue
        left, right = _longest(block, start, end)
        if right - left > 0.1 * inch:
            axes.vlines((left + picture.shift_us) / 1e3, bottom, bottom + 0.86, "white", linewidth=0.8)
        if right - left >= _LETTER_INCHES * len(block.name) * inch:
            middle = ((left + right) / 2 + picture.shift_us) / 1e3
            axes.text(middle, -block.lane, plain_text(block.name), ha="center", va="center", fontsize=FONT_SIZE)
    axes.set_xlim(window[0] / 1e3, window[1] / 1e3)
    axes.set_ylim(-1.5, 0.5)
    axes.set_yticks([0, -1], LANES)
    axes.set_frame_on(False)
    axes.tick_params(length=0, labelsize=FONT_SIZE)
    axes.xaxis.set_major_formatter("{x:g} ms")


def _add_legend(figure: "Figure", pictures: Sequence[Picture]) -> None:
    """Add a legend entry for each colour that covers enough of the time to be seen."""
    from matplotlib.patches import Patch

    end, times = max(picture.end_us for picture in pictures), defaultdict[str, float](float)
    for picture in pictures:
        for block in picture.blocks:
            times[picture.colour(block)] += total(block.intervals)
    labels = {COLOURS[letter]: LABELS[letter] for letter in COLOURS} | {OTHER: "other"}
    entries = [Patch(facecolor=colour, label=labels[colour]) for colour in labels if times[colour] > end / 100]
    figure.legend(handles=entries, loc="outside lower left", ncols=5, fontsize=FONT_SIZE, frameon=False)
