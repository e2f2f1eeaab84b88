"""GPUs that share tile sizes.

Triton uses the same matrix instructions for all GPUs of a major compute capability: mma for 8.x, wgmma for 9.0,
tcgen05 for 10.x, and mma with the tensor memory accelerator (TMA) for 12.x. So these GPUs share one set of tiles, which
must fit in the smallest shared memory among them.
"""

import functools
import warnings

import torch

SHARED_LIMIT = {"sm_80": 101_376, "sm_90": 232_448, "sm_100": 232_448, "sm_120": 101_376, "gfx942": 65_536}
"""Architectures in the shipped table -> the smallest shared memory per block in their family, in bytes. sm_80 itself
has more (166,912), but sm_86 and sm_89 do not."""
_NVIDIA = {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_120"}  # by major version
_AMD = ("gfx90a", "gfx942", "gfx950")


@functools.cache
def family_of(arch: str) -> str:
    """The architecture in the shipped table whose tiles `arch` uses, for example "sm_100" for "sm_103".

    For an unknown architecture, warns once, and returns the nearest family whose tiles fit in this GPU's shared memory.
    """
    if arch == "interpreter":
        return arch
    if arch.startswith("gfx"):
        return "gfx942" if arch in _AMD else _warn(arch, "gfx942")
    major = int(arch.removeprefix("sm_")) // 10
    if major in _NVIDIA:
        return _NVIDIA[major]
    available = shared_memory_limit()
    # If no family's tiles are certain to fit, use the smallest ones.
    too_large = {m: max(0, SHARED_LIMIT[family] - available) for m, family in _NVIDIA.items()}
    return _warn(arch, _NVIDIA[min(_NVIDIA, key=lambda m: (too_large[m], abs(m - major)))])


def shared_memory_limit(device: torch.device | None = None) -> int:
    """The shared memory that a block may use on `device`, in bytes. None: the current GPU."""
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "shared_memory_per_block_optin", 0) or properties.shared_memory_per_block


def _warn(arch: str, family: str) -> str:
    remedy = "`python -m benchmarks.tune` finds tile sizes for this GPU and saves them"
    warnings.warn(f"no tile sizes are known for {arch}, so kernels use those of {family}: {remedy}", stacklevel=2)
    return family
