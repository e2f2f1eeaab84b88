"""The FLOPs of a token, and the peak FLOP/s of a device. Their ratio gives the model FLOPs utilization (MFU).

models/shape.py says which FLOPs count. Its causal attention gives a lower utilization than counting all scores would.
"""

import re

import torch

from ...models.config import ModelConfig
from ...models.costs import flops_shape
from .device import device_names, load_device

PARTIAL = {"mig", "laptop", "d"}  # these words mark a slice of a device, or a smaller device of the same name


def train_flops_per_token(config: ModelConfig, seq_len: int) -> int:
    """FLOPs of a forward and a backward per token, with your own layers: `ModelShape.train_flops`."""
    return flops_shape(config).train_flops(seq_len)


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
