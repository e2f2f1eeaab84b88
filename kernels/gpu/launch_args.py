"""What the launchers of kernels share: the architecture of the GPU, the grid, and the arguments of the products."""

import functools
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

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


def launch_grid(slots: int, columns: int, block_n: int, num_sms: int | None) -> tuple[int]:
    """One program per tile, but at most `num_sms`."""
    tiles = slots * ceil_div(columns, block_n)
    return (tiles if num_sms is None else min(tiles, num_sms),)


def dot_precision(dtype: torch.dtype) -> str:
    """The `input_precision` of tl.dot: "tf32" for float32 on NVIDIA if torch allows TF32, else "ieee"."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    # torch.get_float32_matmul_precision() raises if TF32 was allowed through this attribute.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def uses_tma(w: Tensor, config: TileConfig) -> bool:
    """Whether the tensor memory accelerator (TMA) loads the weights. It needs rows aligned to 16 bytes."""
    return config.tma and w.shape[-1] * w.element_size() % 16 == 0 and w.data_ptr() % 16 == 0


def weights_argument(w: Tensor, box: tuple[int, int, int], config: TileConfig) -> Tensor | TensorDescriptor:
    """The weights as a kernel argument: a TMA descriptor that loads `box` at a time, or the plain tensor."""
    if not uses_tma(w, config):
        return w
    _, rows, columns = w.shape
    # Not w.stride(): the stride of a dimension of size 1 is arbitrary, and a descriptor needs multiples of 16 bytes.
    return TensorDescriptor(w, [*w.shape], [rows * columns, columns, 1], [*box])


def launch_settings(config: TileConfig, w: Tensor) -> dict[str, Any]:
    """The keyword arguments that all products with weights take at launch."""
    return {
        "TMA": uses_tma(w, config), "PRECISION": dot_precision(w.dtype), "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, "GROUP_M": config.group_m, **compile_options(config),
    }  # fmt: skip


def compile_options(config: TileConfig) -> dict[str, int]:
    """The options of Triton's compiler. Without maxnreg if it is None, because only NVIDIA GPUs have it."""
    options = {"num_warps": config.warps, "num_stages": config.stages}
    return options if config.maxnreg is None else {**options, "maxnreg": config.maxnreg}
