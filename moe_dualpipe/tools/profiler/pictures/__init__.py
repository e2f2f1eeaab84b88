"""Pictures of traces: computation above communication, as an image, or to zoom into with ui.perfetto.dev."""

from .lanes import lanes_figure, measurement_pictures, save_lanes, trace_pictures
from .picture import Picture

__all__ = ["Picture", "lanes_figure", "measurement_pictures", "save_lanes", "trace_pictures"]
