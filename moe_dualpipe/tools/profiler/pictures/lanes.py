"""Draw traces as lanes: computation above communication, like DeepSeek's published profiles, and copies below.

palette.py says what the colors mean. An image has at most MAX_PICTURES devices; a note tells how many were left out.

To zoom into a trace, use ui.perfetto.dev: it shows the same rows, names, details, causes and memory
of any number of events, it searches and measures, and people know it. A page of our own was 1,200 lines and a second
set of tests in a browser. Its only advantages were its colors and that it needed no network.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ....messages import plural
from ...drawing.figures import save_figure
from ..reports.overlap import hidden_sentence
from .lanes_image import lanes_figure
from .perfetto import write_perfetto
from .picture import Picture, Slice

if TYPE_CHECKING:
    from ..files import TracedDevice, TraceFiles
    from ..measure import Measurement

SUFFIXES = (".png", ".svg", ".json", ".json.gz")
MAX_PICTURES = 8


def trace_pictures(files: "TraceFiles") -> list[Picture]:
    """Return one picture per device, on one time axis. If the ranks' clocks cannot be compared, each starts at 0."""
    known = [skew.shift_us for skew in files.skews if skew.shift_us is not None]
    shifts = [shift - min(known) for shift in known] if len(known) == len(files.skews) else [0.0] * len(files.skews)
    names = files.names if len(files.devices) > 1 else [files.devices[0].analysis.name]
    rows = zip(names, files.devices, shifts, strict=True)
    return [picture for name, device, shift in rows for picture in _picture(f"{name}: ", device, shift)]


def measurement_pictures(measurement: "Measurement") -> list[Picture]:
    """Return the lanes of this rank in both runs."""
    rank = "rank 0, " if len(measurement.runs["overlapped"].devices) > 1 else ""
    runs = [(run, files.devices[0]) for run, files in measurement.runs.items()]
    titles = [f"{rank}{run}: {device.analysis.window_us / 1e3:,.1f} ms, " for run, device in runs]
    return [
        picture for title, (_, device) in zip(titles, runs, strict=True) for picture in _picture(title, device, 0.0)
    ]


def _picture(title: str, device: "TracedDevice", shift: float) -> Iterator[Picture]:
    """Yield the picture of a device, unless its lanes were not collected."""
    found, start = device.analysis, device.transfers.start_us
    if device.lanes is not None:
        account = [
            Slice(entry.start_us - start, entry.end_us - start, entry.kind, {"detail": entry.detail})
            for entry in found.account
        ]
        yield Picture(title + hidden_sentence(found), device.lanes, shift, found.verdicts, account)


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
