"""Text generation with a key/value cache, in one process or through a pipeline."""
