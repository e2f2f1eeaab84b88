"""How much a token costs to compute, and how much a device can: the two sides of model FLOPs utilisation.

Model FLOPs are those of the matrix products that the mathematics needs, two for each multiply-add, however they are
computed: what is recomputed does not count (arXiv 2204.02311, appendix B), nor do norms, the softmax and the lookup in
the embedding. Of the experts a token is multiplied with K and the shared ones. A backward is two forwards.

Attention is counted causal: a position meets itself and those before it, (S + 1) / 2 of S on average. The paper counts
all S, as if half of the work were not masked out; the lower count gives the lower utilisation.
"""

import re

import torch

from ..models.attention import ATTENTION
from ..models.config import ModelConfig
from ..models.partition import head_flops, layer_flops, mtp_module_flops

# Dense bf16, with sums in fp32, in FLOP/s: from the makers' data sheets, whose number for sparse matrices is halved.
# A device is the first of these whose words are all in its name.
PEAKS = {
    "gb200": 2500e12, "b200": 2250e12,
    "gh200": 989.4e12, "h200 nvl": 835.5e12, "h200": 989.4e12,
    "h100 pcie": 756e12, "h100 nvl": 835.5e12, "h100": 989.4e12, "h800 pcie": 756e12, "h800": 989.4e12, "h20": 148e12,
    "a100": 312e12, "a800": 312e12, "l40s": 362e12, "l4": 121e12, "a10": 125e12, "rtx 4090": 165.2e12,
    "mi300x": 1307.4e12, "mi325x": 1307.4e12,
}  # fmt: skip
PARTIAL = {"mig", "laptop", "d"}  # a slice of a device, or a smaller one of the same name


def forward_flops(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of a forward, per token of a sequence of `seq_len`: the average over its positions.

    Example: the preset `tiny` has 2 x 822,272 for its weights; at 256 tokens attention adds 4 layers x 257 x 256.
    """
    layers = sum(layer_flops(config, layer) for layer in range(config.num_layers))
    return layers + head_flops(config) + score_flops(config, seq_len) * config.num_layers


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of a forward and a backward, per token: three forwards, with what predicts further ahead."""
    return 3 * (forward_flops(config, seq_len) + mtp_flops(config, seq_len) // seq_len)


def mtp_flops(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of predicting further ahead than the next token, forward, for a whole sequence, as training does it.

    The k-th module meets k positions less than there are.
    """
    modules = [(seq_len - k, block) for k, block in enumerate(config.mtp_blocks, start=1)]
    return sum(n * (mtp_module_flops(config, block) + score_flops(config, n)) for n, block in modules)


def score_flops(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of the attention scores, and of the sums of values, of one layer: per token, forward."""
    return ATTENTION[config.attention].score_flops(config, seq_len)


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """FLOP/s that a device promises for dense products of `dtype`; None where that is not known, as for CPUs.

    device_name: as `torch.cuda.get_device_name()` has it. Known are bfloat16 and float16, which are equally fast.
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    if dtype not in (torch.bfloat16, torch.float16) or words & PARTIAL:
        return None
    return next((peak for name, peak in PEAKS.items() if words.issuperset(name.split())), None)
