"""One file in the safetensors format: its header, and the bytes of its tensors.

    8 bytes          length of the header, little-endian
    the header       JSON: name -> dtype, shape, and the range of the tensor's bytes after the header
    the tensors      without gaps

The safetensors library maps files into memory. If a mapped file is truncated or its disk fails, the process dies by
SIGBUS. So this project reads and writes the bytes itself. Files are not trusted: the whole header is checked before
any tensor is read, and no tensor may be longer than the file.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data import DataFile
from ..data.stores import RangedFile, url_of
from ..data.strict_json import parse
from ..messages import printable, quoted
from .manifest import MAX_DIMS, reading, valid_count

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The dtypes of the format, except those of less than a byte, F4 and F6."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_ALIGNMENT = 8
_GIT_LFS = b"version "  # the first bytes of the text that git checks out without git-lfs


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is stored. start: its first byte in `file`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A safetensors file. Keeps its header, and opens the file again for each tensor, so it holds no descriptor.

    Raises ValueError, which names the file, if it cannot be read or is invalid. `read` also raises it if the file has
    changed since.
    """

    def __init__(self, path: Path):
        self.path = path
        with _open(path) as file:
            self._status = file.status
            length = _header_length(path, file.read(0, min(file.size, _LENGTH_BYTES)), file.size)
            header = file.read(_LENGTH_BYTES, length)
        with reading(path):
            self.entries = parse_header(header, path, file.size)

    def read(self, first: int, buffer: Tensor) -> None:
        """Fill `buffer`, a CPU tensor of uint8, with the bytes from offset `first`."""
        with _open(self.path, self._status) as file:
            file.read_into(first, buffer.numpy().data)


def _open(path: Path, expected: Any = None) -> DataFile | RangedFile:
    """A local file, or one on a store, of which only parts are read. expected: its status."""
    ranged = url_of(path) is not None and not path.exists()
    return RangedFile(path, expected) if ranged else DataFile(path, expected)


def _header_length(path: Path, start: bytes, size: int) -> int:
    length = int.from_bytes(start, "little")
    with reading(path):
        if start == _GIT_LFS:
            raise ValueError("it is a Git LFS pointer in place of the file: run git lfs pull")
        if len(start) < _LENGTH_BYTES or length > size - _LENGTH_BYTES:
            raise ValueError(
                f"it has {size:,} bytes, fewer than its header: it is incomplete, or not a safetensors file"
            )
        if length > _MAX_HEADER:
            raise ValueError(f"its header has {length:,} bytes, at most {_MAX_HEADER:,} are valid")
    return length


def parse_header(header: bytes, path: Path, size: int) -> dict[str, TensorEntry]:
    """Return the tensors of a file of `size` bytes, in the order of the header. Raises ValueError without its name."""
    described = parse(header)
    if not isinstance(described, dict):
        raise ValueError("its header is not a JSON object")
    metadata = described.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"its {_METADATA} is not an object of strings")
    end = _LENGTH_BYTES + len(header)
    entries = {}
    for name, fields in described.items():
        try:
            entries[name] = _entry(fields, path, end)
        except ValueError as error:
            raise ValueError(f"{quoted(name, 60)}: {error}") from None
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            problem = "overlaps another tensor" if entry.start < end else "leaves a gap before it"
            raise ValueError(f"{quoted(name, 60)} {problem}: it starts at byte {entry.start:,}, expected {end:,}")
        end += entry.nbytes
    if end != size:
        problem = "it is incomplete" if end > size else "the rest belongs to no tensor"
        raise ValueError(f"it has {size:,} bytes, but its tensors end at byte {end:,}: {problem}")
    return entries


def _entry(fields: Any, path: Path, data: int) -> TensorEntry:
    if not isinstance(fields, dict) or (missing := {"dtype", "shape", "data_offsets"} - fields.keys()):
        raise ValueError(f"it has no {min(missing)}" if isinstance(fields, dict) else "it is not a JSON object")
    kind, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(kind, str) or (dtype := DTYPES.get(kind)) is None:
        raise ValueError(f"unknown dtype {quoted(kind, 20)}; supported are {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ValueError(f"{quoted(shape, 60)} is not a shape")
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise ValueError(f"{quoted(offsets, 60)} is not a range of bytes")
    valid_count(math.prod(max(valid_count(size), 1) for size in shape))  # torch computes strides in 64 bits
    begin, end = map(valid_count, offsets)
    entry = TensorEntry(dtype, tuple(shape), path, data + begin)
    if end - begin != entry.nbytes:
        raise ValueError(f"it has {end - begin:,} bytes, but {kind} {printable(shape, 60)} takes {entry.nbytes:,}")
    return entry


def make_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> tuple[bytes, int]:
    """Return the first bytes of a file with these tensors, up to the tensors, and the size of the whole file.

    Tensors with larger elements come first, as in files of the safetensors library: then each begins at a multiple of
    its element size, and readers can map it without a copy. Raises ValueError for a dtype that the format lacks.
    """
    header: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: -item[1][0].itemsize):
        if name in header or dtype not in _NAMES:
            problem = "a safetensors file cannot have a tensor named" if name in header else f"cannot store {dtype} of"
            raise ValueError(f"{problem} {quoted(name, 60)}")
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _NAMES[dtype], "shape": [*shape], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text, _LENGTH_BYTES + len(text) + end
