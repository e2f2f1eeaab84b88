"""Write the tensors of a Hugging Face checkpoint, one at a time.

Names, dtypes and shapes are known before the first tensor, so headers, shards and index are planned first. Then each
tensor is written to its place in its shard, so the memory needed is that of one tensor.

    model.safetensors                                       if all tensors fit into one shard
    model-00001-of-00003.safetensors, ...                   otherwise, divided as transformers does
    model.safetensors.index.json                            which shard has which tensor
"""

import json
import math
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..data.synced_files import SyncedFile, sync, write_synced
from ..messages import quoted
from .tensor_file import TensorEntry, make_header, parse_header
from .tensor_folder import INDEX_FILE, SINGLE_FILE

TensorSpec = tuple[torch.dtype, Sequence[int]]
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?) ?([KMGT])(I?)B", re.ASCII)


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A shard before it is written. size: bytes of the file. header: its first bytes. names: in the planned order."""

    path: Path
    size: int
    header: bytes
    names: Sequence[str]
    entries: Mapping[str, TensorEntry]

    @classmethod
    def of(cls, path: Path, tensors: Mapping[str, TensorSpec]) -> "PlannedFile":
        header, size = make_header(tensors)
        return cls(path, size, header, [*tensors], parse_header(header[8:], path, size))


class TensorWriter:
    """Writes tensors into new files of an existing folder, synced to disk.

    tensors: dtype and shape of each, in the order in which they will be written.
    max_shard_size: bytes of tensors in a shard, or a text such as "5GB" or "512MiB". A larger tensor gets its own
    shard.
    share: (rank, size): of `size` writers, this one writes the shards rank, rank + size, ... The first also writes the
    index. files: the planned shards. own_files: those that this writer writes.

    Raises ValueError for dtypes that the format lacks. Methods raise OSError, with the name of the file, if it cannot
    be written; incomplete files remain.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, TensorSpec], max_shard_size: int | str = "5GB",
        share: tuple[int, int] = (0, 1),
    ):  # fmt: skip
        if not tensors:
            raise ValueError(f"no tensors to write into {folder}")
        self.folder = folder
        shards = _divide(tensors, parse_size(max_shard_size))
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        paths = [folder / name for name in (names if len(shards) > 1 else [SINGLE_FILE])]
        self.files: Sequence[PlannedFile] = [*map(PlannedFile.of, paths, shards)]
        rank, size = share
        self.own_files = self.files[rank::size]
        self._writes_index = rank == 0 and len(self.files) > 1
        self._left = deque((file, name) for file in self.own_files for name in file.names)
        self._output: SyncedFile | None = None

    def write(self, name: str, tensor: Tensor) -> None:
        """Write the next tensor. Raises ValueError if another one was planned, or another dtype or shape."""
        if not self._left:
            raise ValueError(f"all planned tensors were written: got {quoted(name, 60)}")
        file, planned = self._left[0]
        if name != planned:
            raise ValueError(f"the next tensor is {quoted(planned, 60)}, not {quoted(name, 60)}")
        entry = file.entries[name]
        if (tensor.dtype, tuple(tensor.shape)) != (entry.dtype, entry.shape):
            expected = f"{entry.dtype} {[*entry.shape]}"
            raise ValueError(f"{quoted(name, 60)} was planned as {expected}: got {tensor.dtype} {[*tensor.shape]}")
        if self._output is None:
            self._output = SyncedFile(file.path, "x")
            self._output.write(file.header)
        self._output.seek(entry.start)
        self._output.write(_bytes_of(tensor))
        self._left.popleft()
        if not self._left or self._left[0][0] is not file:
            self._output.sync_and_close()
            self._output = None

    def close(self) -> None:
        """Write the index. Raises ValueError if a tensor was not written."""
        if self._left:
            names = [name for _, name in self._left]
            raise ValueError(f"{len(names):,} planned tensors were not written, the first is {quoted(names[0], 60)}")
        if self._writes_index:
            total = sum(entry.nbytes for file in self.files for entry in file.entries.values())
            listed = {name: file.path.name for file in self.files for name in file.names}
            index = {"metadata": {"total_size": total}, "weight_map": listed}
            write_synced(self.folder / INDEX_FILE, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())
        sync(self.folder)


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


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def _divide(tensors: Mapping[str, TensorSpec], limit: int) -> list[dict[str, TensorSpec]]:
    """Divide tensors into shards of at most `limit` bytes, in their order. A larger tensor gets its own shard."""
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, (dtype, shape) in tensors.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if shards[-1] and filled + size > limit:
            shards.append({})
            filled = 0
        shards[-1][name] = dtype, shape
        filled += size
    return shards


def parse_size(size: int | str) -> int:
    """Return a number of bytes: 5GB is 5 x 1000^3, 5GiB is 5 x 1024^3. Raises ValueError."""
    if isinstance(size, str) and (match := _SIZE.fullmatch(size.strip().upper())):
        number, unit, binary = match.groups()
        size = int(float(number) * (1024 if binary else 1000) ** ("KMGT".index(unit) + 1))
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"a shard size is a number of bytes, or a text such as 5GB: got {quoted(size, 60)}")
    return size
