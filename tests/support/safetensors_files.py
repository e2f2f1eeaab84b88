"""Safetensors files for tests: tensors of every dtype, and files with any header."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_dualpipe.checkpoint.tensor_file import DTYPES


def tensor_of(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Random bits. NaN differs from itself, so compare with `same`."""
    size = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (bits % 2 if dtype is torch.bool else bits).view(dtype).reshape(shape)


def every_dtype() -> dict[str, Tensor]:
    """Tensors of each dtype and of awkward shapes, whose sizes are not multiples of 8."""
    shapes = ((3, 5), (), (0, 4), (1,), (2, 1, 7))
    return {f"{name}.{i}": tensor_of(DTYPES[name], *shape) for name in DTYPES for i, shape in enumerate(shapes)}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and every bit."""
    bits_a, bits_b = (t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits_a, bits_b)


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [*offsets]}


def write_file(path: Path, header: Any, data: bytes = b"") -> Path:
    """header: a value for JSON, or its text."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def write_shards(folder: Path, shards: dict[str, dict[str, Tensor]], **changes: Any) -> Path:
    """Write shards with the safetensors library, and an index. changes: of the index's weight_map."""
    from safetensors.torch import save_file

    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors} | changes
    index = {"metadata": {"total_size": 1}, "weight_map": {n: f for n, f in weight_map.items() if f is not None}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
