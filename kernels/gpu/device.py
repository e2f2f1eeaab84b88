"""What a launcher asks about the machine: which GPU this is, whether Triton interprets, how fp32 is multiplied."""

import functools

import torch
import triton


def interpreter_enabled() -> bool:
    """Whether kernels run in Triton's interpreter, on CPU tensors: TRITON_INTERPRET=1 when triton was imported."""
    return triton.knobs.runtime.interpret


def arch_of(device: torch.device) -> str:
    """The name of a GPU's architecture: "sm_90", "gfx942"; "interpreter" for a CPU."""
    return "interpreter" if device.type == "cpu" else _arch(device.index)


@functools.cache
def _arch(index: int | None) -> str:
    if torch.version.hip:
        return torch.cuda.get_device_properties(index).gcnArchName.partition(":")[0]
    major, minor = torch.cuda.get_device_capability(index)
    return f"sm_{major}{minor}"


def dot_precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies fp32: exactly, unless torch was told that TF32 is good enough."""
    if dtype != torch.float32 or torch.version.hip:
        return "ieee"
    # torch.get_float32_matmul_precision() raises where the setting was made through this attribute.
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
