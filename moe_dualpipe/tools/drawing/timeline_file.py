"""Save a timeline, simulated or measured, to a file."""

from pathlib import Path

from ...schedule.timeline import Timeline
from .figures import save_figure
from .timeline_plot import timeline_figure

TIMELINE_SUFFIXES = (".svg", ".png", ".csv")


def save_timeline(timeline: Timeline, path: str | Path, until: float | None = None) -> None:
    """Save in the format of the suffix: a figure (.svg, .png) up to the time `until`, or the schedule alone (.csv).

    Raises ValueError for any other suffix, and ImportError for a figure if matplotlib is not installed.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".svg" | ".png":
            save_figure(timeline_figure(timeline, until), path)
        case ".csv":
            path.write_text(timeline.schedule.to_csv())
        case _:
            raise ValueError(f"cannot write {path.name!r}: use one of {', '.join(TIMELINE_SUFFIXES)}")
