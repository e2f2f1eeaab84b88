"""What lets one chunk's work run beside another's."""

from .chunk import Segmented
from .engine import Engine
from .segment import Arriving, Comm, Compute, Prepare, Segments, in_layer
from .weight_grads import WeightGrads, accumulate, bind

__all__ = [
    "Arriving",
    "Comm",
    "Compute",
    "Engine",
    "Prepare",
    "Segmented",
    "Segments",
    "WeightGrads",
    "accumulate",
    "bind",
    "in_layer",
]
