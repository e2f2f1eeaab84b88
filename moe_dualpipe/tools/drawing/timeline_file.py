"""Save a timeline, simulated or measured, to a file."""

from pathlib import Path

from ...data import strict_json
from ...schedule.timeline import Timeline
from .figures import save_figure
from .timeline_plot import timeline_figure
from .timeline_trace import chrome_trace

TIMELINE_SUFFIXES = (".svg", ".png", ".json", ".csv")


def save_timeline(timeline: Timeline, path: str | Path) -> None:
    """Save in the format of the suffix: a figure (.svg, .png), a Chrome trace (.json), or the schedule alone (.csv).

    Raises ValueError for any other suffix, and ImportError for a figure if matplotlib is not installed.
    """
    path = Path(path)
    match path.suffix.lower():
        case ".svg" | ".png":
            save_figure(timeline_figure(timeline), path)
        case ".json":
            path.write_text(strict_json.write(chrome_trace(timeline)))
        case ".csv":
            path.write_text(timeline.schedule.to_csv())
        case _:
            raise ValueError(f"cannot write {path.name!r}: use one of {', '.join(TIMELINE_SUFFIXES)}")
