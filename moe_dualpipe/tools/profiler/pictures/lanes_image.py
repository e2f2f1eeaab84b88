"""Draw lanes as an image, with a legend of what is drawn.

Labels are the names of phases or, outside of phases, of kernels. If the trace is too long for labels to fit, a second
set of lanes below shows a part of it with labels. Lanes in which no device has work are left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...drawing.figures import new_figure, plain_text
from ..intervals import Intervals, intersection, union, union_length
from ..kernel_names import shortened
from ..lanes import COMMUNICATION, LANES, Ints, Lanes, runs
from .lanes_windows import Window, label_of, time_until, windows_of
from .palette import EXPOSED, HIDDEN, STYLES, has_letters, styles_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .lanes import Picture

WIDTH, FONT_SIZE = 9.0, 9  # inches and points: the text is 11 pixels high in an image 800 pixels wide
_TITLE: dict[str, Any] = {"fontsize": FONT_SIZE, "loc": "left"}
_SMALLEST = 5  # points: lower rows have no labels
_LANE_INCHES, _LETTER_WIDTH = 7.7, 0.58 / 72  # a letter's width in inches, divided by the size of the font
_NARROWEST, _MARGIN = 0.28, 0.06  # the width of an "i" as a share of the size; inches left free beside a label
_LANE_HEIGHTS, _SPACE, _INCHES = (0.86, 0.86, 0.4), 0.14, 0.42  # the unit of height, about so many inches
_STRIP = 0.1  # the height of exposed communication if colors show phases
_PIXELS = 1200  # shorter gaps than a lane's length divided by this are not drawn


def lanes_figure(pictures: Sequence["Picture"], note: str = "") -> "Figure":
    """Draw the pictures below each other on one time axis. Raises ImportError if matplotlib is not installed.

    note: a line below them.
    """
    windows = windows_of(pictures, _LETTER_WIDTH * FONT_SIZE, _LANE_INCHES)
    used = _used_lanes(pictures)
    letters = has_letters([picture.lanes for picture in pictures])
    height, count = 0.25 + 0.55 * sum(_LANE_HEIGHTS[lane] for lane in used), len(pictures) * len(windows)
    figure = new_figure(WIDTH, 0.4 + height * count)
    rows = figure.subplots(count, squeeze=False)[:, 0]
    for (whole, *details), picture in zip(rows.reshape(len(pictures), len(windows)), pictures, strict=True):
        styles = styles_of(picture.lanes, letters)
        _Panel(whole, picture, windows[0], styles, letters, used).draw(labels=not details)
        whole.set_title("\n".join(map(plain_text, wrap(picture.title, 115))), **_TITLE)
        for axes, window in zip(details, windows[1:], strict=True):
            _Panel(axes, picture, window, styles, letters, used).draw(labels=True)
            length = window[1] - window[0]
            unit, size = _unit(length)
            axes.set_title(f"the part in the frame, {float(f'{length / size:.3g}'):,g} {unit}", **_TITLE)
            bottom, top = whole.get_ylim()
            frame = bottom + 0.02, top - bottom - 0.04
            span = (window[0] / 1e3, length / 1e3)
            whole.broken_barh([span], frame, facecolors="none", edgecolors="black", zorder=3)
    _add_legend(figure, pictures, windows, letters)
    if note:
        figure.supxlabel(plain_text(note), fontsize=FONT_SIZE, x=0.99, ha="right")
    return figure


def _used_lanes(pictures: Sequence["Picture"]) -> list[int]:
    """Lanes in which any of the pictures has work; computation always."""
    return sorted({0}.union(*(np.unique(picture.lanes.lane).tolist() for picture in pictures)))


def _fitting(text: str, inches: float, size: float) -> str:
    """Return `text`, shortened until it fits into so many inches; "" if less than two letters and "…" would fit."""
    most = int(inches / (_NARROWEST * size / 72))
    if most < 3 or (len(text) <= most and _inches(text, size) <= inches):
        return text if most >= 3 else ""
    cuts = (shortened(text, letters) for letters in range(min(most, len(text) - 1), 2, -1))
    return next((cut for cut in cuts if _inches(cut, size) <= inches), "")


@lru_cache(maxsize=1 << 14)
def _inches(text: str, size: float) -> float:
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    width, _, _ = text_to_path.get_text_width_height_descent(plain_text(text), FontProperties(size=size), ismath=False)
    return width / 72


@dataclass(frozen=True)
class _Panel:
    """The lanes of one picture in one window."""

    axes: "Axes"
    picture: "Picture"
    window: Window
    styles: Ints
    letters: bool
    used: Sequence[int]

    @property
    def start(self) -> float:
        return self.window[0] - self.picture.shift_us

    @property
    def end(self) -> float:
        return self.window[1] - self.picture.shift_us

    @property
    def pixel(self) -> float:
        """Shorter gaps are not drawn, in us."""
        return (self.end - self.start) / _PIXELS

    def draw(self, labels: bool) -> None:
        lanes = self.picture.lanes
        heights = [_LANE_HEIGHTS[lane] for lane in self.used]
        bottoms = [-sum(heights[: number + 1]) - _SPACE * number for number in range(len(heights))]
        visible = (lanes.end > self.start) & (lanes.start < self.end)
        exposed = lanes.exposed
        for lane, bottom in zip(self.used, bottoms, strict=True):
            rows = int(lanes.row[lanes.lane == lane].max(initial=0)) + 1
            height = _LANE_HEIGHTS[lane] / rows
            for row in range(rows):
                base = bottom + height * (rows - 1 - row)
                chosen = (lanes.lane == lane) & (lanes.row == row)
                self._draw_row(visible & chosen, base, height, exposed if lane == COMMUNICATION else None)
                if labels:
                    self._add_labels(lanes.select(chosen), self.styles[chosen], base, height)
        self.axes.set_ylim(bottoms[-1] - 0.06, 0.06)
        self._set_axes([bottom + height / 2 for bottom, height in zip(bottoms, heights, strict=True)])

    def _draw_row(self, chosen: NDArray[np.bool_], base: float, height: float, exposed: Intervals | None) -> None:
        """Draw the work of a row. Where several styles share a pixel, it shows the one with the most time."""
        lanes, numbers = self.picture.lanes, np.unique(self.styles[chosen])
        busy, edges = close_gaps(lanes.busy(chosen), self.pixel), np.linspace(self.start, self.end, _PIXELS + 1)
        pixels = np.stack([edges[:-1], edges[1:]], axis=1)
        times = [np.diff(time_until(lanes.busy(chosen & (self.styles == number)), edges)) for number in numbers]
        for which, number in enumerate(numbers):
            most = (np.argmax(times, axis=0) == which) & (times[which] > 0)
            self._bars(intersection(busy, union(pixels[most])), base, height, STYLES[number].color)
        if exposed is not None:
            self._draw_exposed(intersection(lanes.busy(chosen), exposed), base, height)

    def _draw_exposed(self, exposed: Intervals, base: float, height: float) -> None:
        """Exposed times with gaps too short to be drawn become one bar, as high as their share of it."""
        joined, height = close_gaps(exposed, self.pixel), min(_STRIP, height / 3) if self.letters else height
        inside = time_until(exposed, joined[:, 1]) - time_until(exposed, joined[:, 0])
        eighths = np.maximum(np.round(8 * inside / (joined[:, 1] - joined[:, 0])), 1)
        for count in np.unique(eighths):
            self._bars(joined[eighths == count], base, height * count / 8, EXPOSED.color)

    def _bars(self, intervals: Intervals, base: float, height: float, color: str) -> None:
        shift = self.picture.shift_us
        spans = [((a + shift) / 1e3, (b - a) / 1e3) for a, b in intervals.tolist()]
        self.axes.broken_barh(spans, (base, height), facecolors=color, edgecolors="none")

    def _add_labels(self, lanes: Lanes, styles: Ints, base: float, height: float) -> None:
        """Label the runs of one row, where a label fits; shorten long ones."""
        size, inch = min(FONT_SIZE, 72 * _INCHES * height * 0.8), (self.end - self.start) / _LANE_INCHES
        ink_of = {int(name): STYLES[style].ink for name, style in zip(lanes.name, styles, strict=True)}
        for run in runs(lanes, (self.end - self.start) / 400):
            left, right = max(run.start, self.start), min(run.end, self.end)
            if right - left > 0.1 * inch and run.start >= self.start:
                x = (left + self.picture.shift_us) / 1e3
                self.axes.vlines(x, base, base + height, "white", linewidth=0.8)
            text = _fitting(label_of(lanes, run), (right - left) / inch - _MARGIN, size) if size >= _SMALLEST else ""
            if text:
                x, y = ((left + right) / 2 + self.picture.shift_us) / 1e3, base + height / 2
                ink = ink_of[run.name]
                self.axes.text(x, y, plain_text(text), ha="center", va="center", fontsize=size, color=ink)

    def _set_axes(self, middles: Sequence[float]) -> None:
        self.axes.set_xlim(self.window[0] / 1e3, self.window[1] / 1e3)
        self.axes.set_yticks(middles, [LANES[lane] for lane in self.used])
        self.axes.set_frame_on(False)
        self.axes.tick_params(length=0, labelsize=FONT_SIZE)
        unit, size = _unit(self.window[1])
        self.axes.xaxis.set_major_formatter(lambda ms, _: f"{ms * 1e3 / size:g} {unit}")


def _unit(us: float) -> tuple[str, float]:
    """Return the unit that suits a time, and its length in us."""
    return ("s", 1e6) if us >= 1e6 else ("ms", 1e3) if us >= 1e3 else ("us", 1.0)


def close_gaps(intervals: Intervals, gap: float) -> Intervals:
    """Join intervals that are at most `gap` apart."""
    return union(intervals + np.array([0.0, gap])) - np.array([0.0, gap]) if gap else intervals


def _add_legend(figure: "Figure", pictures: Sequence["Picture"], windows: Sequence[Window], letters: bool) -> None:
    """Add a legend entry for each color that covers enough of a window to be seen."""
    from matplotlib.patches import Patch

    seen: set[int] = set()
    for window in windows:
        times = sum(_style_times(picture, window, letters) for picture in pictures)
        seen |= {*np.flatnonzero(times > (window[1] - window[0]) / 1000).tolist()}
    entries = [Patch(facecolor=STYLES[number].color, label=STYLES[number].label) for number in sorted(seen)]
    figure.legend(handles=entries, loc="outside lower left", ncols=5, fontsize=FONT_SIZE, frameon=False)


def _style_times(picture: "Picture", window: Window, letters: bool) -> NDArray[np.float64]:
    """How long each style runs in a window."""
    lanes, inside = picture.lanes, np.array([window]) - picture.shift_us
    styles = styles_of(lanes, letters)
    times = np.array(
        [union_length(intersection(lanes.busy(styles == number), inside)) for number in range(len(STYLES))]
    )
    exposed = union_length(intersection(lanes.exposed, inside))
    times[STYLES.index(EXPOSED)] += exposed
    times[STYLES.index(HIDDEN)] -= exposed
    return times
