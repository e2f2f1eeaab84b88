"""Draw traces as lanes: computation above communication, like DeepSeek's published profiles, and copies below.

An image is for a page or a slide. To zoom into a trace, and to search and measure in it, use ui.perfetto.dev. In an
image, each lane is a row of pixels, and a pixel has the color of what ran longest in it.

If phases have this project's letters, (F), (B), (I) and (W), a color shows the letter. In all other traces, a color
shows the category of a kernel (../categories.py). Most colors are of Paul Tol's scheme "light", which was made for
black text and can be told apart by people who are color-blind (https://personal.sron.nl/~pault/). A red strip marks
exposed communication: the more of a pixel is exposed, the stronger.
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ....messages import plural
from ....overlap.labels import letter_of
from ...drawing.figures import new_figure, plain_text, save_figure
from ...drawing.timeline import COLORS as COLORS_OF_LETTERS
from ...drawing.timeline import LABELS
from ..categories import category_of
from ..intervals import Intervals, as_intervals, length_before, union
from ..trace import DeviceEvent, Kind
from .perfetto import write_perfetto
from .picture import LANES, Picture, Slice, runs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".png", ".svg", ".json", ".json.gz")
MAX_PICTURES = 8
"""An image has so many devices at most; a note tells how many were left out."""
PIXELS = 1200
OTHER, HIDDEN, COPIES, EXPOSED = "other", "communication", "copies", "exposed communication"
CATEGORY_COLORS = {
    "GEMM": "#77aadd", "grouped GEMM": "#99ddff", "attention": "#44bb99", "convolution": "#7788cc",
    "normalization": "#bbcc33", "softmax and loss": "#88cc77", "elementwise": "#eedd88", "reduction": "#aaaa00",
    "routing": "#ffaabb", "embedding": "#cc99cc", "optimizer": "#bb8899", "data movement": "#ccaa88",
}  # fmt: skip
COLORS = {LABELS[letter]: color for letter, color in COLORS_OF_LETTERS.items()} | CATEGORY_COLORS
COLORS |= {OTHER: "#cccccc", HIDDEN: "#3399cc", COPIES: "#ee8866", EXPOSED: "#cc3311"}
"""In the order of the legend."""
_STYLES = [*COLORS]
_FONT = 9  # points: the text is 11 pixels high in an image 800 pixels wide
_LANE_INCHES = 7.7
_SPACE, _STRIP = 0.14, 0.1


def save_lanes(pictures: Sequence[Picture], path: Path) -> None:
    """Save an image of the first pictures (.png, .svg), or all of them for ui.perfetto.dev (.json, .json.gz).

    Raises ImportError for an image if matplotlib is not installed.
    """
    if path.suffix.lower() in (".json", ".gz"):
        write_perfetto(pictures, path)
        return
    left_out = len(pictures) - MAX_PICTURES
    note = f"{plural(left_out, 'more device')} not drawn" if left_out > 0 else ""
    save_figure(lanes_figure(pictures[:MAX_PICTURES], note), path)


def lanes_figure(pictures: Sequence[Picture], note: str = "") -> "Figure":
    """Draw the pictures below each other on one time axis. Raises ImportError if matplotlib is not installed.

    note: a line below them. Lanes in which no device has work are left out.
    """
    used: list[Kind] = [kind for kind in LANES if kind == "compute" or any(one.of_kind(kind) for one in pictures)]
    letters = any(letter_of(one.part) for picture in pictures for one in picture.work)
    end = max(picture.end_us for picture in pictures)
    height = 0.25 + 0.55 * sum(LANES[kind][1] for kind in used)
    figure = new_figure(9.0, 0.4 + height * len(pictures))
    seen: set[str] = set()
    for axes, picture in zip(figure.subplots(len(pictures), squeeze=False)[:, 0], pictures, strict=True):
        seen |= _draw(axes, picture, end, used, letters)
        axes.set_title("\n".join(map(plain_text, wrap(picture.title, 115))), fontsize=_FONT, loc="left")
    _add_legend(figure, seen)
    if note:
        figure.supxlabel(plain_text(note), fontsize=_FONT, x=0.99, ha="right")
    return figure


def style_of(event: DeviceEvent, letters: bool) -> str:
    """The color of an event, as it is called in the legend."""
    if letters:
        return LABELS.get(letter_of(event.part) or "", OTHER)
    category = category_of(event)
    return {"comm": HIDDEN, "copy": COPIES}.get(event.kind, category if category in CATEGORY_COLORS else OTHER)


def _draw(axes: "Axes", picture: Picture, end: float, used: Sequence[Kind], letters: bool) -> set[str]:
    """Draw the lanes of one device. Returns the styles that can be seen."""
    edges = np.linspace(0.0, end, PIXELS + 1) - picture.shift_us
    top, middles, seen = 0.0, [], set[str]()
    for kind in used:
        bottom, work = top - LANES[kind][1], picture.of_kind(kind)
        times = _times(work, letters, edges)
        shown = np.where(times.any(axis=0), times.argmax(axis=0), -1)
        _add_pixels(axes, shown, np.ones(PIXELS), end, bottom, top)
        seen |= {_STYLES[number] for number in np.unique(shown[shown >= 0]).tolist()}
        if kind == "comm" and len(picture.exposed):
            share = np.diff(length_before(picture.exposed)(edges)) / (end / PIXELS)
            _add_pixels(axes, np.full(PIXELS, _STYLES.index(EXPOSED)), share, end, bottom, bottom + _STRIP)
            seen.add(EXPOSED)
        _add_labels(axes, picture, work, end, bottom, top)
        middles.append((bottom + top) / 2)
        top = bottom - _SPACE
    axes.set(xlim=(0, end / 1e3), ylim=(top + 0.08, 0.06), aspect="auto")
    axes.set_yticks(middles, [LANES[kind][0] for kind in used])
    axes.set_frame_on(False)
    axes.tick_params(length=0, labelsize=_FONT)
    unit, size = ("s", 1e6) if end >= 1e6 else ("ms", 1e3) if end >= 1e3 else ("us", 1.0)
    axes.xaxis.set_major_formatter(lambda ms, _: f"{ms * 1e3 / size:g} {unit}")
    return seen


def _times(work: Sequence[DeviceEvent], letters: bool, edges: np.ndarray) -> np.ndarray:
    """How long each style runs in each pixel, shape [styles, pixels]."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one in work:
        spans[style_of(one, letters)].append((one.start, one.end))
    busy: list[Intervals] = [union(as_intervals(spans[style])) for style in _STYLES]
    return np.stack([np.diff(length_before(own)(edges)) for own in busy])


def _add_pixels(axes: "Axes", styles: np.ndarray, opacity: np.ndarray, end: float, bottom: float, top: float) -> None:
    """Draw a row of pixels. A style of -1 is not drawn."""
    from matplotlib.colors import to_rgba

    table: Any = np.array([*map(to_rgba, COLORS.values()), (1, 1, 1, 0)])
    pixels = table[styles]
    pixels[:, 3] *= opacity.clip(0, 1)
    axes.imshow(pixels[np.newaxis], extent=(0, end / 1e3, bottom, top), interpolation="nearest", aspect="auto")


def _add_labels(
    axes: "Axes", picture: Picture, work: Sequence[DeviceEvent], end: float, bottom: float, top: float
) -> None:
    """Name the phases or kernels of one lane, where a name fits; shorten long ones."""
    inch, boxes = end / _LANE_INCHES, list[Slice]()
    for run in sorted(runs(work, end / 400)):  # those of other streams, too, are one box
        if boxes and boxes[-1].name == run.name and run.start - boxes[-1].end <= end / 400:
            run = run._replace(start=boxes[-1].start, end=max(boxes.pop().end, run.end))
        boxes.append(run)
    for start, until, name, _ in boxes:
        if until - start > 0.1 * inch:
            axes.vlines((start + picture.shift_us) / 1e3, bottom, top, "white", linewidth=0.8)
        if text := fitting(name, (until - start) / inch):
            middle = ((start + until) / 2 + picture.shift_us) / 1e3
            axes.text(middle, (bottom + top) / 2, plain_text(text), ha="center", va="center", fontsize=_FONT)


def fitting(name: str, inches: float) -> str:
    """The longest of these that fits: the name, without its letter, its beginning, and its letter; or "".

    The color of a segment tells its letter, too: "dispatch(F)", "dispatch", "dispa…", "F".
    """
    letter = letter_of(name) or ""
    base = name.removesuffix(f"({letter})")
    beginnings = (f"{base[:letters]}…" for letters in range(len(base) - 2, 1, -1))
    return next((text for text in (name, base, *beginnings, letter) if text and _inches(text) <= inches), "")


@cache
def _inches(text: str) -> float:
    """The width of a text, with some space beside it."""
    from matplotlib.textpath import TextPath

    return (TextPath((0, 0), plain_text(text), size=_FONT).get_extents().width + 1.5) / 72


def _add_legend(figure: "Figure", seen: set[str]) -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=color, label=label) for label, color in COLORS.items() if label in seen]
    figure.legend(handles=entries, loc="outside lower left", ncols=5, fontsize=_FONT, frameon=False)
