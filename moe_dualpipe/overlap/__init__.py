"""Run one chunk's computation while another chunk's data is being transferred.

Exports are imported on first use (lazy_exports.py), so that programs without torch can import labels.py.
"""

from typing import TYPE_CHECKING

from ..lazy_exports import on_first_use

if TYPE_CHECKING:
    from ..kernels.weight_grads import WeightGrads, bind
    from .engine import Engine
    from .segment import Comm, Compute, PrepareComm, Segments, in_layer
    from .segmented import Segmented

__all__ = ["Comm", "Compute", "Engine", "PrepareComm", "Segmented", "Segments", "WeightGrads", "bind", "in_layer"]
__getattr__ = on_first_use(__name__)
