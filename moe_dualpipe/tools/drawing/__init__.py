"""Drawings that several tools share: timelines of schedules, tables, and saved figures."""

from .timeline_figure import save_timeline, timeline_figure

__all__ = ["save_timeline", "timeline_figure"]
