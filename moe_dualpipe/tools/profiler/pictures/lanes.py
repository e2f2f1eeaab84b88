"""Draw traces as lanes: computation above communication, like DeepSeek's published profiles, and copies below.

An image is for a page or a slide. To zoom into a trace, use ui.perfetto.dev: it shows names, details and causes of any
number of events, it searches and measures, and people know it.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....messages import plural
from ...drawing.figures import save_figure
from ..reports.overlap import hidden_sentence
from .lanes_image import lanes_figure
from .perfetto import write_perfetto
from .picture import Picture

if TYPE_CHECKING:
    from ..files import TracedDevice, TraceFiles
    from ..measure import Measurement

SUFFIXES = (".png", ".svg", ".json", ".json.gz")
MAX_PICTURES = 8
"""An image has so many devices at most; a note tells how many were left out."""


def trace_pictures(files: "TraceFiles") -> list[Picture]:
    """Return one picture per device, on one time axis. If the ranks' clocks cannot be compared, each starts at 0."""
    known = [shift for shift in files.comparison.shifts_us if shift is not None]
    aligned = len(known) == len(files.devices)
    shifts = [shift - min(known) for shift in known] if aligned else [0.0] * len(files.devices)
    names = files.names if len(files.devices) > 1 else [files.devices[0].analysis.name]
    rows = zip(names, files.devices, shifts, strict=True)
    return [_picture(f"{name}: ", device, shift) for name, device, shift in rows]


def measurement_pictures(measurement: "Measurement") -> list[Picture]:
    """Return the lanes of both runs."""
    return [
        _picture(f"{run}: {device.analysis.window_us / 1e3:,.1f} ms, ", device, 0.0)
        for run, device in measurement.devices.items()
    ]


def _picture(title: str, device: "TracedDevice", starts_at: float) -> Picture:
    found, shift = device.analysis, starts_at - device.transfers.start_us
    return Picture(title + hidden_sentence(found), device.work, shift, found.account, found.verdicts)


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
