"""What several tools draw alike: timelines of schedules, tables, and how figures are saved."""

from .timeline_file import save_timeline
from .timeline_plot import timeline_figure

__all__ = ["save_timeline", "timeline_figure"]
