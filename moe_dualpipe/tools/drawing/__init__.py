"""What several tools draw alike: timelines of schedules, tables, and how figures are saved."""

from .timeline_figure import save_timeline, timeline_figure

__all__ = ["save_timeline", "timeline_figure"]
