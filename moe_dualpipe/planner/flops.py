"""The FLOPs of a token, and the peak FLOP/s of a device. Their ratio gives the model FLOPs utilization (MFU).

Model FLOPs are those of the necessary matrix products, two for each multiply-add (arXiv 2204.02311, appendix B).
Recomputation, norms, the softmax and the embedding lookup do not count. A token's K experts and the shared experts
count. A backward counts as two forwards.

Attention counts as causal: on average, a position attends to (S + 1) / 2 of S positions. The paper counts all S,
including the masked half. The lower count used here gives a lower utilization.
"""

import re

import torch

from ..models.attention import attention_costs
from ..models.config import ModelConfig
from ..models.partition import head_flops, layer_flops, mtp_module_flops
from .device import device_names, load_device

PARTIAL = {"mig", "laptop", "d"}  # these words mark a slice of a device, or a smaller device of the same name


def forward_flops(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of a forward per token: the average over the positions of a sequence of `seq_len`.

    Example: the preset `tiny` needs 2 x 822,272 for its weights. At 256 tokens attention adds 4 layers x 257 x 256.
    """
    layers = sum(layer_flops(config, layer) for layer in range(config.num_layers))
    return layers + head_flops(config) + score_flops(config, seq_len)


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of a forward and a backward per token: three forwards, multi-token prediction (MTP) included."""
    return 3 * (forward_flops(config, seq_len) + mtp_flops(config, seq_len) // seq_len)


def mtp_flops(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of multi-token prediction, forward, for a whole sequence. Module k computes seq_len - k positions."""
    scores = attention_costs(config).score_flops
    modules = [(seq_len - k, block) for k, block in enumerate(config.mtp_blocks, start=1)]
    return sum(n * (mtp_module_flops(config, block) + scores(config, n)) for n, block in modules)


def score_flops(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of the attention scores and sums of values of all layers, per token, forward."""
    return config.num_layers * attention_costs(config).score_flops(config, seq_len)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a device for dense products of bfloat16 or float16, which are equally fast.

    device_name: the result of `torch.cuda.get_device_name()`. Returns None for unknown devices and other dtypes.
    """
    if dtype not in (torch.bfloat16, torch.float16) or (name := known_device(device_name)) is None:
        return None
    return load_device(name).peak.get("bf16")


def known_device(device_name: str) -> str | None:
    """The name of the file in devices/ for a device that CUDA calls `device_name`; None if there is none.

    The device has all words of the file's name. The longest such name counts: an "H100 PCIe" is not an "H100".
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    named = [name for name in device_names() if words.issuperset(name.split("-"))]
    return max(named, key=len) if named and not words & PARTIAL else None
