"""Run one chunk's computation while another chunk's data is being transferred.

Exports are imported on first use, so that programs without torch can import labels.py.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..kernels.weight_grads import WeightGrads, bind
    from .engine import Engine
    from .segment import Comm, Compute, PrepareComm, Segments, in_layer
    from .segmented import Segmented

__all__ = ["Comm", "Compute", "Engine", "PrepareComm", "Segmented", "Segments", "WeightGrads", "bind", "in_layer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from . import segment, segmented

    return getattr(segment if hasattr(segment, name) else segmented, name)
