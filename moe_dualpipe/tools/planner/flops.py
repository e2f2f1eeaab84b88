"""The peak FLOP/s of the device that CUDA names, for the model FLOPs utilization (MFU)."""

import re

import torch

from .device import device_names, load_device

PARTIAL = {"mig", "laptop", "d"}  # these words mark a slice of a device, or a smaller device of the same name


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
