"""Run one chunk's computation while another chunk's data is being transferred.

Exports are loaded on first use: labels.py is also read where torch is not imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..kernels.weight_grads import WeightGrads, bind
    from .engine import Engine
    from .segment import Comm, Compute, PrepareComm, Segments, in_layer
    from .segmented import Segmented

__all__ = ["Comm", "Compute", "Engine", "PrepareComm", "Segmented", "Segments", "WeightGrads", "bind", "in_layer"]


def __getattr__(name: str) -> Any:
    for module in (".segment", ".segmented"):
        if name in __all__ and hasattr(found := import_module(module, __name__), name):
            return getattr(found, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
