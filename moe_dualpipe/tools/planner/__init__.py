"""What a run costs before it starts: parameters, FLOPs, memory of every rank, step time, and the best layout."""

from ...models.costs import shape_of, train_flops_per_token
from ...models.shape import Attention, Layer, ModelShape, Product
from .activations import MicroBatch
from .constants import Constant
from .device import Device, device_names, load_device, peak_flops
from .layout_search import search
from .peak import PeakMemory, full_schedule, peak_memory, stages_of
from .prediction import Estimate, estimate
from .published_shapes import read_shape
from .step import Step
from .workload import Workload, layout_of

__all__ = [
    "Attention", "Constant", "Device", "Estimate", "Layer", "MicroBatch", "ModelShape",
    "PeakMemory", "Product", "Step", "Workload", "device_names", "estimate", "full_schedule",
    "layout_of", "load_device", "peak_flops", "peak_memory", "read_shape", "search", "shape_of", "stages_of",
    "train_flops_per_token",
]  # fmt: skip
