"""Draw lanes as an image, with a legend of what is drawn.

Labels are the names of phases or, outside of phases, of kernels, where they fit. Lanes in which no device has work are
left out. The page (page.py) shows parts of a long trace.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...drawing.figures import new_figure, plain_text
from ..intervals import Intervals, intersection, length_before, union, union_length
from ..kernel_names import short_name, shortened
from ..lanes import COMMUNICATION, LANES, Ints, Lanes, Run, runs
from .palette import EXPOSED, HIDDEN, STYLES, has_letters, styles_of
from .picture import Picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


WIDTH, FONT_SIZE = 9.0, 9  # inches and points: the text is 11 pixels high in an image 800 pixels wide
_TITLE: dict[str, Any] = {"fontsize": FONT_SIZE, "loc": "left"}
_SMALLEST = 5  # points: lower rows have no labels
_LANE_INCHES = 7.7
_NARROWEST, _MARGIN = 0.28, 0.06  # the width of an "i" as a share of the size; inches left free beside a label
_LANE_HEIGHTS, _SPACE, _INCHES = (0.86, 0.86, 0.4), 0.14, 0.42  # the unit of height, about so many inches
_STRIP = 0.1  # the height of exposed communication if colors show phases
_PIXELS = 1200  # shorter gaps than a lane's length divided by this are not drawn


def lanes_figure(pictures: Sequence[Picture], note: str = "") -> "Figure":
    """Draw the pictures below each other on one time axis. Raises ImportError if matplotlib is not installed.

    note: a line below them.
    """
    end = max(picture.end_us for picture in pictures)
    used = _used_lanes(pictures)
    letters = has_letters([picture.lanes for picture in pictures])
    height = 0.25 + 0.55 * sum(_LANE_HEIGHTS[lane] for lane in used)
    figure = new_figure(WIDTH, 0.4 + height * len(pictures))
    rows = figure.subplots(len(pictures), squeeze=False)[:, 0]
    for axes, picture in zip(rows, pictures, strict=True):
        _Panel(axes, picture, end, styles_of(picture.lanes, letters), letters, used).draw()
        axes.set_title("\n".join(map(plain_text, wrap(picture.title, 115))), **_TITLE)
    _add_legend(figure, pictures, end, letters)
    if note:
        figure.supxlabel(plain_text(note), fontsize=FONT_SIZE, x=0.99, ha="right")
    return figure


def _used_lanes(pictures: Sequence[Picture]) -> list[int]:
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
    """The lanes of one picture. end_us: of the time axis, which starts at 0."""

    axes: "Axes"
    picture: Picture
    end_us: float
    styles: Ints
    letters: bool
    used: Sequence[int]

    @property
    def pixel(self) -> float:
        """Shorter gaps are not drawn, in us."""
        return self.end_us / _PIXELS

    def draw(self) -> None:
        lanes = self.picture.lanes
        heights = [_LANE_HEIGHTS[lane] for lane in self.used]
        bottoms = [-sum(heights[: number + 1]) - _SPACE * number for number in range(len(heights))]
        exposed = lanes.exposed
        for lane, bottom in zip(self.used, bottoms, strict=True):
            rows = int(lanes.row[lanes.lane == lane].max(initial=0)) + 1
            height = _LANE_HEIGHTS[lane] / rows
            for row in range(rows):
                base = bottom + height * (rows - 1 - row)
                chosen = (lanes.lane == lane) & (lanes.row == row)
                self._draw_row(chosen, base, height, exposed if lane == COMMUNICATION else None)
                self._add_labels(lanes.select(chosen), self.styles[chosen], base, height)
        self.axes.set_ylim(bottoms[-1] - 0.06, 0.06)
        self._set_axes([bottom + height / 2 for bottom, height in zip(bottoms, heights, strict=True)])

    def _draw_row(self, chosen: NDArray[np.bool_], base: float, height: float, exposed: Intervals | None) -> None:
        """Draw the work of a row. Where several styles share a pixel, it shows the one with the most time."""
        lanes, numbers = self.picture.lanes, np.unique(self.styles[chosen])
        busy = close_gaps(lanes.busy(chosen), self.pixel)
        edges = np.linspace(0.0, self.end_us, _PIXELS + 1) - self.picture.shift_us
        pixels = np.stack([edges[:-1], edges[1:]], axis=1)
        times = [np.diff(length_before(lanes.busy(chosen & (self.styles == number)))(edges)) for number in numbers]
        for which, number in enumerate(numbers):
            most = (np.argmax(times, axis=0) == which) & (times[which] > 0)
            self._bars(intersection(busy, union(pixels[most])), base, height, STYLES[number].color)
        if exposed is not None:
            self._draw_exposed(intersection(lanes.busy(chosen), exposed), base, height)

    def _draw_exposed(self, exposed: Intervals, base: float, height: float) -> None:
        """Exposed times with gaps too short to be drawn become one bar, as high as their share of it."""
        joined, height = close_gaps(exposed, self.pixel), min(_STRIP, height / 3) if self.letters else height
        before = length_before(exposed)
        inside = before(joined[:, 1]) - before(joined[:, 0])
        eighths = np.maximum(np.round(8 * inside / (joined[:, 1] - joined[:, 0])), 1)
        for count in np.unique(eighths):
            self._bars(joined[eighths == count], base, height * count / 8, EXPOSED.color)

    def _bars(self, intervals: Intervals, base: float, height: float, color: str) -> None:
        shift = self.picture.shift_us
        spans = [((a + shift) / 1e3, (b - a) / 1e3) for a, b in intervals.tolist()]
        self.axes.broken_barh(spans, (base, height), facecolors=color, edgecolors="none")

    def _add_labels(self, lanes: Lanes, styles: Ints, base: float, height: float) -> None:
        """Label the runs of one row, where a label fits; shorten long ones."""
        size, inch = min(FONT_SIZE, 72 * _INCHES * height * 0.8), self.end_us / _LANE_INCHES
        ink_of = {int(name): STYLES[style].ink for name, style in zip(lanes.name, styles, strict=True)}
        for run in runs(lanes, self.end_us / 400):
            left, right = run.start, run.end
            if right - left > 0.1 * inch:
                x = (left + self.picture.shift_us) / 1e3
                self.axes.vlines(x, base, base + height, "white", linewidth=0.8)
            text = _fitting(_label_of(lanes, run), (right - left) / inch - _MARGIN, size) if size >= _SMALLEST else ""
            if text:
                x, y = ((left + right) / 2 + self.picture.shift_us) / 1e3, base + height / 2
                ink = ink_of[run.name]
                self.axes.text(x, y, plain_text(text), ha="center", va="center", fontsize=size, color=ink)

    def _set_axes(self, middles: Sequence[float]) -> None:
        self.axes.set_xlim(0, self.end_us / 1e3)
        self.axes.set_yticks(middles, [LANES[lane] for lane in self.used])
        self.axes.set_frame_on(False)
        self.axes.tick_params(length=0, labelsize=FONT_SIZE)
        unit, size = _unit(self.end_us)
        self.axes.xaxis.set_major_formatter(lambda ms, _: f"{ms * 1e3 / size:g} {unit}")


def _unit(us: float) -> tuple[str, float]:
    """Return the unit that suits a time, and its length in us."""
    return ("s", 1e6) if us >= 1e6 else ("ms", 1e3) if us >= 1e3 else ("us", 1.0)


def close_gaps(intervals: Intervals, gap: float) -> Intervals:
    """Join intervals that are at most `gap` apart."""
    return union(intervals + np.array([0.0, gap])) - np.array([0.0, gap]) if gap else intervals


def _label_of(lanes: Lanes, run: Run) -> str:
    return lanes.phases[run.phase] if run.phase >= 0 else short_name(lanes.names[run.name])


def _add_legend(figure: "Figure", pictures: Sequence[Picture], end_us: float, letters: bool) -> None:
    """Add a legend entry for each color that covers enough of the time to be seen."""
    from matplotlib.patches import Patch

    times = sum(_style_times(picture.lanes, letters) for picture in pictures)
    seen = np.flatnonzero(times > end_us / 1000).tolist()
    entries = [Patch(facecolor=STYLES[number].color, label=STYLES[number].label) for number in seen]
    figure.legend(handles=entries, loc="outside lower left", ncols=5, fontsize=FONT_SIZE, frameon=False)


def _style_times(lanes: Lanes, letters: bool) -> NDArray[np.float64]:
    """How long each style runs."""
    styles, exposed = styles_of(lanes, letters), union_length(lanes.exposed)
    times = np.array([union_length(lanes.busy(styles == number)) for number in range(len(STYLES))])
    times[STYLES.index(EXPOSED)] += exposed
    times[STYLES.index(HIDDEN)] -= exposed
    return times
