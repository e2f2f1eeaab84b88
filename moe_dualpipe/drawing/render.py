"""Render a timeline, simulated or measured: as text, as a figure, as a Chrome trace, or its order as CSV."""

from pathlib import Path

from ..schedule.timeline import Timeline
from .chrome_trace import chrome_trace, write_trace
from .figure import add_legend, draw, draw_on, save_figure
from .terminal import text
from .timeline import COLOURS, boxes, number, sizes, span_of, summary, title

__all__ = [
    "COLOURS", "SUFFIXES", "add_legend", "boxes", "chrome_trace", "draw", "draw_on", "number", "save", "sizes",
    "span_of", "summary", "text", "title", "write_trace",
]  # fmt: skip

SUFFIXES = (".svg", ".png", ".json", ".csv")


def save(timeline: Timeline, path: str | Path) -> None:
    """Write what the suffix says: .svg or .png a figure, .json a Chrome trace, .csv the order.

    Raises ValueError for another suffix, ImportError where a figure is wanted and matplotlib is not installed.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".svg" | ".png":
            save_figure(timeline, path)
        case ".json":
            write_trace(timeline, path)
        case ".csv":
            path.write_text(timeline.schedule.to_csv())
        case _:
            raise ValueError(f"cannot write {path.name!r}: use one of {', '.join(SUFFIXES)}")
