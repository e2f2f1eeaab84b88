"""Check a model and its layers: parallel runs against one process, and a layer of your own against its contract.

A check returns a `Report`: one row per law, with what was measured and, in plain words, what is wrong and where.
"""

from .report import Check, Report

__all__ = ["Check", "Report"]
