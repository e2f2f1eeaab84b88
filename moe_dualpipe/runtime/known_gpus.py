"""The GPUs that have a file in devices/, found by the names that CUDA reports, and their peak rates.

A training run needs only the peak, for its utilization. The planner reads everything in these files.
"""

import json
import re
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "devices"
_PARTIAL = {"mig", "laptop", "d"}  # these words mark a slice of a GPU, or a smaller GPU of the same name


def device_names() -> list[str]:
    """The names of all files, sorted."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def known_device(device_name: str) -> str | None:
    """The name of the file for a GPU that CUDA calls `device_name`; None if there is none.

    The GPU has all words of the file's name. The longest such name counts: an "H100 PCIe" is not an "H100".
    """
    words = set(re.findall(r"[a-z0-9]+", device_name.lower()))
    named = [name for name in device_names() if words.issuperset(name.split("-"))]
    return max(named, key=len) if named and not words & _PARTIAL else None


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak FLOP/s of a GPU for dense products of bfloat16 or float16, which are equally fast.

    device_name: the result of `torch.cuda.get_device_name()`. Returns None for unknown GPUs and other dtypes.
    """
    if dtype not in (torch.bfloat16, torch.float16) or (name := known_device(device_name)) is None:
        return None
    return json.loads((FOLDER / f"{name}.json").read_text())["peak"]["bf16"]
