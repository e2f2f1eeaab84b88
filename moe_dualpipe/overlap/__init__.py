"""What lets one chunk's work run beside another's."""

from .chunk import Segmented
from .engine import Engine
from .segment import Comm, Compute, Prepare, Segments, in_layer
from .weight_grads import WeightGrads, bind

__all__ = ["Comm", "Compute", "Engine", "Prepare", "Segmented", "Segments", "WeightGrads", "bind", "in_layer"]
