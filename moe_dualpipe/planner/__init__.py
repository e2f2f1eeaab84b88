"""What a model costs before it runs: parameters, FLOPs, activations, and the memory of every rank."""

from .activations import MicroBatch
from .flops import forward_flops, peak_flops, train_flops_per_token
from .memory import ModelSize, RankMemory, rank_memory

__all__ = [
    "MicroBatch", "ModelSize", "RankMemory", "forward_flops", "peak_flops", "rank_memory", "train_flops_per_token",
]  # fmt: skip
