"""Pictures of traces for ui.perfetto.dev."""
