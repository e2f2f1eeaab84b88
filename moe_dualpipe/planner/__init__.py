"""What a model costs before it runs: parameters, FLOPs, activations, and the memory of every rank."""

from .activations import MicroBatch
from .device import Device, device_names, load_device
from .flops import forward_flops, peak_flops, train_flops_per_token
from .memory import ModelSize, RankMemory, rank_memory
from .placement import Placement, imbalance, place_experts

__all__ = [
    "Device", "MicroBatch", "ModelSize", "Placement", "RankMemory", "device_names", "forward_flops", "imbalance",
    "load_device", "peak_flops", "place_experts", "rank_memory", "train_flops_per_token",
]  # fmt: skip
