"""Check a model and its layers: parallel runs against one process, and your own layer against its contract.

A check returns a `Report`: one row per law, with what was measured and, in plain words, what is wrong and where.
"""

from .laws import Check, Report
from .layers import check_attention, check_block, check_experts, check_router
from .parallel import check_parallel
from .run import Variant

__all__ = [
    "Check",
    "Report",
    "Variant",
    "check_attention",
    "check_block",
    "check_experts",
    "check_parallel",
    "check_router",
]  # fmt: skip
