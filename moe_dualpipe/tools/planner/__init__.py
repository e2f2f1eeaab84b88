"""What a run costs before it starts: parameters, FLOPs, memory of every rank, step time, and the best layout."""

from ...models.costs import shape_of, train_flops_per_token
from ...models.shape import Attention, Layer, ModelShape, Product
from .constants import Constant
from .device import Device, load_device
from .layout_search import search
from .prediction import Estimate, estimate
from .published_shapes import read_shape
from .stages import full_schedule, stages_of
from .step import Step
from .workload import Workload, layout_of

__all__ = [
    "Attention", "Constant", "Device", "Estimate", "Layer", "ModelShape",
    "Product", "Step", "Workload", "estimate", "full_schedule",
    "layout_of", "load_device", "read_shape", "search", "shape_of", "stages_of",
    "train_flops_per_token",
]  # fmt: skip
