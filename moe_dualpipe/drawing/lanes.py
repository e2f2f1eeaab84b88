"""A trace as a picture: what computed, above what communicated, in the manner of DeepSeek's published profile.

A block is what one annotation launched; its colour says whether that belongs to a forward (F), a backward (B) or a
weight gradient (W), by the letter in brackets at the end of its name. DeviceEvent without an annotation is grey.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..overlap.labels import letter_of
from ..profiler.blocks import LANES, LaneBlock
from .figures import new_figure, save_figure
from .overlap_report import hidden_sentence
from .page import write_page
from .timeline_boxes import COLOURS, LABELS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..profiler.files import TraceFiles
    from ..profiler.measure import Measurement

SUFFIXES = (".png", ".svg", ".html")
OTHER = "#c8c8c8"
_MOST_LABELS = 400


@dataclass(frozen=True)
class Picture:
    """Two lanes and what stands above them. shift_us: how much later than the first picture's it begins."""

    title: str
    blocks: Sequence[LaneBlock]
    shift_us: float = 0.0

    @property
    def end_us(self) -> float:
        return self.shift_us + max((float(block.intervals[-1, 1]) for block in self.blocks), default=0.0)

    @staticmethod
    def colour(block: LaneBlock) -> str:
        """By the letter in brackets at the end of its name."""
        letter = letter_of(block.name)
        return COLOURS[letter] if letter else OTHER


def trace_pictures(files: "TraceFiles") -> list[Picture]:
    """A picture of each device, on one time axis; where the ranks' clocks cannot be compared, each starts at 0."""
    known = [other.shift_us for other in files.skews if other.shift_us is not None]
    shifts = [shift - min(known) for shift in known] if len(known) == len(files.skews) else [0.0] * len(files.skews)
    names = files.names if len(files.devices) > 1 else [files.devices[0].analysis.name]
    return [
        Picture(f"{name}: {hidden_sentence(device.analysis)}", device.blocks, shift)
        for name, device, shift in zip(names, files.devices, shifts, strict=True)
    ]


def measurement_pictures(measured: "Measurement") -> list[Picture]:
    """The lanes of rank 0, run in sequence and overlapped."""
    rank = "rank 0, " if len(measured.runs["overlapped"].devices) > 1 else ""
    devices = {way: files.devices[0] for way, files in measured.runs.items()}
    return [
        Picture(f"{rank}{way}: {d.analysis.window_us / 1e3:,.1f} ms, {hidden_sentence(d.analysis)}", d.blocks)
        for way, d in devices.items()
    ]


def save_measurement(measured: "Measurement", folder: Path) -> list[str]:
    """Draw both ways into `folder`. Returns the names of the files; without matplotlib, only the page is drawn."""
    names, pictures = ["timeline.html"], measurement_pictures(measured)
    save_lanes(pictures, folder / names[0])
    with suppress(ImportError):
        save_lanes(pictures, folder / "timeline.png")
        names.append("timeline.png")
    return names


def save_lanes(pictures: Sequence[Picture], path: Path) -> None:
    """Draw them one above the other, on one axis of time, into a .png or .svg, or a page to zoom into (.html).

    Raises ImportError where matplotlib is needed and not installed.
    """
    if path.suffix.lower() == ".html":
        write_page(pictures, path)
        return
    end = max(picture.end_us for picture in pictures)
    figure = new_figure(16, 0.7 + 1.9 * len(pictures))
    rows = figure.subplots(len(pictures), sharex=True, squeeze=False)[:, 0]
    for axes, picture in zip(rows, pictures, strict=True):
        _draw(axes, picture, end)
    rows[-1].set_xlabel("ms", fontsize=8, loc="right", labelpad=1)
    _add_legend(rows[-1])
    save_figure(figure, path)


def _add_legend(axes: "Axes") -> None:
    from matplotlib.patches import Patch

    entries = [Patch(facecolor=COLOURS[letter], label=LABELS[letter]) for letter in "FBW"]
    entries.append(Patch(facecolor=OTHER, label="other"))
    axes.legend(handles=entries, loc="upper left", bbox_to_anchor=(0, -0.12), ncols=4, fontsize=7, frameon=False)


def _draw(axes: "Axes", picture: Picture, end: float) -> None:
    for block in picture.blocks:
        spans = [((start + picture.shift_us) / 1e3, (stop - start) / 1e3) for start, stop in block.intervals.tolist()]
        axes.broken_barh(spans, (-block.lane - 0.43, 0.86), facecolors=picture.colour(block), edgecolors="none")
    for block, (start, stop) in _labelled(picture.blocks, end):
        middle = ((start + stop) / 2 + picture.shift_us) / 1e3
        axes.text(middle, -block.lane, _label(block.name), ha="center", va="center", fontsize=6, rotation=90)
        begins = (block.intervals[0, 0] + picture.shift_us) / 1e3
        axes.vlines(begins, -block.lane - 0.43, -block.lane + 0.43, "white", linewidth=0.5)
    axes.set_xlim(0, end / 1e3)
    axes.set_ylim(-1.5, 0.5)
    axes.set_yticks([0, -1], LANES)
    axes.set_frame_on(False)
    axes.tick_params(length=0, labelsize=8)
    axes.set_title(picture.title, fontsize=9, loc="left")


def _labelled(blocks: Sequence[LaneBlock], end: float) -> list[tuple[LaneBlock, tuple[float, float]]]:
    """Blocks with a piece, the longest one, that is wide enough to be read in; none if there are too many."""
    longest = [
        (block, max(map(tuple, block.intervals.tolist()), key=lambda piece: piece[1] - piece[0]))
        for block in blocks
        if block.name
    ]
    wide = [(block, piece) for block, piece in longest if piece[1] - piece[0] > end / 160]
    return wide if len(wide) <= _MOST_LABELS else []


def _label(name: str) -> str:
    """What fits into a lane from bottom to top."""
    return name if len(name) <= 17 else name[:16] + "\u2026"
