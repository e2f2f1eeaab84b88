"""Pictures of traces: computation above communication, as an image, or to zoom into with ui.perfetto.dev."""
