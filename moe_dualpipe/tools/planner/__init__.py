"""What a run costs before it starts: parameters, FLOPs, memory of every rank, step time, and the best layout."""

from .device import load_device
from .layout_search import search
from .prediction import Estimate, estimate
from .published_shapes import read_shape
from .workload import Workload, layout_of

__all__ = ["Estimate", "Workload", "estimate", "layout_of", "load_device", "read_shape", "search"]
