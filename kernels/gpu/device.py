"""Facts that launchers need: the GPU's architecture, whether Triton interprets, the precision of fp32 products."""

import functools

import torch
import triton


def interpreter_enabled() -> bool:
    """Whether kernels run in Triton's interpreter on CPU tensors: TRITON_INTERPRET=1 was set before triton's import."""
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


def dot_precision(dtype: torch.dtype) -> str:
    """The `input_precision` of tl.dot: "tf32" for float32 on NVIDIA if torch allows TF32, else "ieee"."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    # torch.get_float32_matmul_precision() raises if the setting was made through this attribute.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
