"""Run segments on an engine that a test or a figure observes."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from moe_dualpipe.overlap import Engine, segmented


@contextmanager
def run_on(engine: Engine) -> Iterator[None]:
    """In this context, all segments run on `engine`, and not on the engine of their device."""
    with patch.object(segmented, "engine_for", lambda _device: engine):
        yield
