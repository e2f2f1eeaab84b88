"""The category of a device event, by its name."""

import re

from .trace import DeviceEvent

CATEGORIES = (
    "GEMM", "grouped GEMM", "attention", "normalization", "elementwise", "reduction", "memory", "communication", "copy",
    "other",
)  # fmt: skip
_TABLE = (
    ("grouped GEMM", re.compile("grouped", re.IGNORECASE)),
    ("attention", re.compile("flash|fmha|attention|sdpa", re.IGNORECASE)),
    ("GEMM", re.compile("gemm|cutlass|nvjet|Cijk_|addmm|::mm|::bmm|linear|matmul", re.IGNORECASE)),
    ("normalization", re.compile("norm", re.IGNORECASE)),
    ("reduction", re.compile("reduce|triton_red|softmax|sum", re.IGNORECASE)),
    ("elementwise", re.compile("elementwise|triton_poi|add|mul|copy", re.IGNORECASE)),
)


def category_of(event: DeviceEvent, kind: str) -> str:
    if kind == "comm":
        return "communication"
    if kind == "copy":
        return "copy"
    return next((name for name, pattern in _TABLE if pattern.search(event.name)), "other")
