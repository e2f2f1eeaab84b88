"""Hypothesis, for tests of properties. Where it is not installed, as on a borrowed GPU machine, they are skipped."""

from unittest.mock import MagicMock

import pytest

try:
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as st
except ImportError:
    HealthCheck = st = MagicMock()
    given = settings = lambda *_, **__: pytest.mark.skip(reason="needs hypothesis")

__all__ = ["HealthCheck", "given", "settings", "st"]
