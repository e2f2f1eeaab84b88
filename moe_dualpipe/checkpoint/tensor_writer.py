"""Divide the tensors of a Hugging Face checkpoint into files.

Names, dtypes and shapes are known before the first tensor, so shards and index are planned first.

    model.safetensors                                       if all tensors fit into one shard
    model-00001-of-00003.safetensors, ...                   otherwise, divided as transformers does
    model.safetensors.index.json                            which shard has which tensor
"""

import json
import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..messages import quoted
from .tensor_folder import INDEX_FILE, SINGLE_FILE

TensorSpec = tuple[torch.dtype, Sequence[int]]
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])(I?)B", re.ASCII)


class Shards:
    """How tensors are divided into files.

    tensors: dtype and shape of each, in the order in which they are written. max_shard_size: bytes of tensors in a
    shard, or a text such as "5GB" or "512MiB". A larger tensor gets its own shard.

    files: the tensors of each file. largest: bytes of the largest file. Raises ValueError for a size that is invalid.
    """

    def __init__(self, tensors: Mapping[str, TensorSpec], max_shard_size: int | str = "5GB"):
        sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, (dtype, shape) in tensors.items()}
        shards = divide(sizes, parse_size(max_shard_size))
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        self.files = dict(zip(names if len(shards) > 1 else [SINGLE_FILE], shards, strict=True))
        self.total = sum(sizes.values())
        self.largest = max(sum(sizes[name] for name in shard) for shard in shards)

    def index(self) -> dict[str, bytes]:
        """The file that says which shard has which tensor, by its name; {} with one shard."""
        if len(self.files) == 1:
            return {}
        listed = {name: file for file, names in self.files.items() for name in names}
        index = {"metadata": {"total_size": self.total}, "weight_map": listed}
        return {INDEX_FILE: (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()}


def as_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor to write as `name`, in `dtype`. Raises ValueError if it would hold a NaN or infinity."""
    converted = tensor.to(dtype)
    if converted.numel() and not all(torch.stack(converted.aminmax()).isfinite()):  # a mask would need more memory
        largest = tensor.abs().max().item()
        if math.isfinite(largest):
            limit = torch.finfo(dtype).max
            raise ValueError(f"{name} holds {largest:.4g}, and {dtype} at most {limit:.4g}: choose another dtype")
        raise ValueError(f"{name} holds a NaN or infinity: export an earlier checkpoint")
    return converted


def divide(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Divide tensors into files of at most `limit` bytes, in their order. A larger tensor gets its own file."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def parse_size(size: int | str) -> int:
    """Return a number of bytes: 5GB is 5 x 1000^3, 5GiB is 5 x 1024^3. Raises ValueError."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip().upper())):
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit) + 1))
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"a shard size is a number of bytes, or a text such as 5GB: got {quoted(size, 60)}")
    return size
