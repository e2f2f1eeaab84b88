"""Check that the package deep_ep is installed, has DeepEP 2's interface, and supports this machine."""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

OTHERWISE = "or choose --ep-backend all_to_all"
INSTALL = f"install DeepEP (https://github.com/deepseek-ai/DeepEP), {OTHERWISE}"


@dataclass(frozen=True, slots=True)
class GpuMachine:
    """device_type: whose tensors are sent. capability: compute capability of the GPU."""

    device_type: str
    capability: tuple[int, int]


def inspect_machine(group: dist.ProcessGroup) -> GpuMachine:
    """The machine of this process. Raises ValueError if it has no GPU, or if `group` has no NCCL communicator."""
    if not torch.cuda.is_available():
        raise ValueError(f"DeepEP needs CUDA, which is not available: run on GPUs, {OTHERWISE}")
    if "nccl" not in dist.get_backend(group):
        raise ValueError(f"DeepEP needs a process group of NCCL: got {dist.get_backend(group)}; {OTHERWISE}")
    return GpuMachine("cuda", torch.cuda.get_device_capability())


def load_library() -> Any:
    """Import deep_ep. Raises ValueError, which says what to do, if that fails."""
    try:
        return importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise ValueError(f"deep_ep needs the module {error.name}, which is not installed: {INSTALL}") from error
        raise ValueError(f"the package deep_ep is not installed: {INSTALL}") from error
    except (ImportError, OSError, AssertionError) as error:  # it asserts that NCCL is the one it was built with
        raise ValueError(f"the package deep_ep cannot be imported ({error}): {INSTALL}") from error


def missing_library() -> str:
    """Why `load_library` fails; "" if it does not."""
    try:
        load_library()
    except ValueError as error:
        return str(error)
    return ""


def check_interface(library: Any, machine: GpuMachine) -> None:
    """Raise ValueError if the library is older than DeepEP 2, or the GPU older than Hopper."""
    if not hasattr(library, "ElasticBuffer"):
        version = getattr(library, "__version__", "of unknown version")
        raise ValueError(f"the installed deep_ep {version} has no ElasticBuffer: install DeepEP 2, {OTHERWISE}")
    if machine.capability < (9, 0):
        capability = ".".join(map(str, machine.capability))
        raise ValueError(f"DeepEP needs compute capability 9.0: got {capability}; {OTHERWISE}")


def check_determinism() -> None:
    """Raise ValueError for the combination of torch's options that DeepEP refuses in each call."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:  # type: ignore[attr-defined]
        raise ValueError(
            "DeepEP cannot run with torch.use_deterministic_algorithms(True) and "
            f"torch.utils.deterministic.fill_uninitialized_memory = True: set the latter to False, {OTHERWISE}"
        )
