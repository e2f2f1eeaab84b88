"""Pictures of traces: computation above communication, as an image or as a page to zoom into."""
