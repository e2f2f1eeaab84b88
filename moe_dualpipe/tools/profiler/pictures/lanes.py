"""Draw traces as lanes: computation above communication, like DeepSeek's published profiles, and copies below.

palette.py says what the colors mean. At most MAX_PICTURES devices are drawn, and a note tells how many were left out.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....messages import plural
from ...drawing.figures import save_figure
from ..reports.overlap import hidden_sentence
from .lanes_image import lanes_figure
from .page import write_page
from .picture import Picture

if TYPE_CHECKING:
    from ..files import TraceFiles
    from ..measure import Measurement

SUFFIXES = (".png", ".svg", ".html")
MAX_PICTURES = 8


def trace_pictures(files: "TraceFiles") -> list[Picture]:
    """Return one picture per device, on one time axis. If the ranks' clocks cannot be compared, each starts at 0."""
    known = [skew.shift_us for skew in files.skews if skew.shift_us is not None]
    shifts = [shift - min(known) for shift in known] if len(known) == len(files.skews) else [0.0] * len(files.skews)
    names = files.names if len(files.devices) > 1 else [files.devices[0].analysis.name]
    return [
        Picture(f"{name}: {hidden_sentence(device.analysis)}", device.lanes, shift, device.analysis.verdicts)
        for name, device, shift in zip(names, files.devices, shifts, strict=True)
        if device.lanes is not None
    ]


def measurement_pictures(measurement: "Measurement") -> list[Picture]:
    """Return the lanes of this rank in both runs."""
    rank = "rank 0, " if len(measurement.runs["overlapped"].devices) > 1 else ""
    return [
        Picture(f"{rank}{run}: {d.analysis.window_us / 1e3:,.1f} ms, {hidden_sentence(d.analysis)}", d.lanes)
        for run, files in measurement.runs.items()
        for d in files.devices[:1]
        if d.lanes is not None
    ]


def save_lanes(pictures: Sequence[Picture], path: Path) -> None:
    """Save the pictures as an image (.png, .svg), or as a page to zoom into (.html).

    Raises ImportError for an image if matplotlib is not installed.
    """
    shown, left_out = pictures[:MAX_PICTURES], len(pictures) - MAX_PICTURES
    note = f"{plural(left_out, 'more device')} not drawn" if left_out > 0 else ""
    if path.suffix.lower() == ".html":
        write_page(shown, path, note)
    else:
        save_figure(lanes_figure(shown, note), path)
