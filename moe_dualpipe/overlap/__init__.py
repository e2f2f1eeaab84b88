"""Run one chunk's computation while another chunk's data is being transferred."""

from ..kernels.weight_grads import WeightGrads, bind
from .engine import Engine
from .segment import Collective, Comm, Compute, PrepareComm, Segments, in_layer
from .segmented import Segmented

__all__ = [
    "Collective", "Comm", "Compute", "Engine", "PrepareComm", "Segmented", "Segments", "WeightGrads", "bind",
    "in_layer",
]  # fmt: skip
