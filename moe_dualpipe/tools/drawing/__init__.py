"""Text, figures, traces and web pages of schedules, runs and profiles. training/ and commands/ import this package."""

from ..profiler.pictures.lanes import Picture, lanes_figure, measurement_pictures, save_lanes, trace_pictures
from ..profiler.reports.overlap import analysis_text, hidden_sentence, traces_text
from .timeline_file import save_timeline
from .timeline_plot import timeline_figure

__all__ = [
    "Picture", "analysis_text", "hidden_sentence", "lanes_figure", "measurement_pictures", "save_lanes",
    "save_timeline", "timeline_figure", "trace_pictures", "traces_text",
]  # fmt: skip
