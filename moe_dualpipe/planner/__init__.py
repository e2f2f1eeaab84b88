"""What a model costs before it runs: parameters, FLOPs, activations, and the memory of every rank."""

from .activations import MicroBatch
from .device import Device, device_names, load_device
from .flops import forward_flops, peak_flops, train_flops_per_token
from .memory import ModelSize, RankMemory, rank_memory
from .peak_memory import PeakMemory, even_stages, peak_memory
from .placement import Placement, imbalance, place_experts
from .read_shape import read_shape
from .shape import Attention, Layer, ModelShape, Product, shape_of

__all__ = [
    "Attention", "Device", "Layer", "MicroBatch", "ModelShape", "ModelSize", "PeakMemory", "Placement", "Product",
    "RankMemory", "device_names", "even_stages", "forward_flops", "imbalance", "load_device", "peak_flops",
    "peak_memory", "place_experts", "rank_memory", "read_shape", "shape_of", "train_flops_per_token",
]  # fmt: skip
