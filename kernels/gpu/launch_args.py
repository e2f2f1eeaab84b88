"""What the launchers of kernels share: the architecture of the GPU, the grid, and the arguments of the products."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor

from .configs import TileConfig


def interpreter_enabled() -> bool:
    """Whether Triton's interpreter runs the kernels, on CPU tensors. Set TRITON_INTERPRET=1 before importing triton."""
    return triton.knobs.runtime.interpret


def arch_of(device: torch.device) -> str:
    """Name of a GPU's architecture, such as "sm_90" or "gfx942"; "interpreter" for a CPU."""
    return "interpreter" if device.type == "cpu" else _arch(device.index)


@functools.cache
def _arch(index: int | None) -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up. On the host, `triton.cdiv` takes 6 microseconds."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of 2 that is at least n."""
    return 1 << (n - 1).bit_length()


def launch_grid(
    row_tiles: int, columns: int, block_n: int, config: TileConfig, num_sms: int | None, device: torch.device
) -> tuple[int]:
    """One program per tile; at most `num_sms` programs, or else `config.per_sm` for each multiprocessor."""
    tiles = row_tiles * ceil_div(columns, block_n)
    if num_sms is None and config.per_sm is not None:
        num_sms = config.per_sm * _num_multiprocessors(device)
    return (tiles if num_sms is None else min(tiles, num_sms),)


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    """1 for a CPU: the interpreter runs one program at a time."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


def dot_precision(dtype: torch.dtype) -> str:
    """The `input_precision` of tl.dot: "tf32" for float32 on NVIDIA if torch allows TF32, else "ieee"."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    # torch.get_float32_matmul_precision() raises if TF32 was allowed through this attribute.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def launch_settings(config: TileConfig, w: Tensor, tma: bool) -> dict[str, Any]:
    """The keyword arguments that all products with weights take at launch. tma: whether TMA loads the weights."""
    return {
        "TMA": tma, "PRECISION": dot_precision(w.dtype), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m, **compile_options(config),
    }  # fmt: skip


def compile_options(config: TileConfig) -> dict[str, int]:
    """The options of Triton's compiler. Without maxnreg if it is None, because only NVIDIA GPUs have it."""
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return options if config.maxnreg is None else {**options, "maxnreg": config.maxnreg}
