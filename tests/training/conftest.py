"""Fixtures of the tests of training."""

from types import SimpleNamespace

import pytest

from moe_dualpipe.data import documents
from tests.support.runs import TEXT


@pytest.fixture(autouse=True)
def _small_standard_library(monkeypatch):
    """The default text is one package of Python's standard library. To find all its files takes a second."""
    monkeypatch.setattr(documents, "sysconfig", SimpleNamespace(get_path=lambda _: TEXT))
