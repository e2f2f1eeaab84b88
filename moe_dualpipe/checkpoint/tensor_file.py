"""Tensors in safetensors files. The safetensors library writes them and checks headers; this module reads the tensors.

    8 bytes          length of the header, little-endian
    the header       JSON: name -> dtype, shape, and the range of the tensor's bytes after the header
    the tensors      without gaps

The library can read tensors in two ways, and neither will do. If it maps a file that is then truncated, or whose disk
fails, SIGBUS kills the process without a message. With `backend="pread"`, it holds the GIL while it reads (1.5 s for
2 GiB on a fast disk): the heartbeat of the rank stops, and after 10 s the rank counts as dead. So this module reads the
bytes with `pread`. A file on an object store is copied when the first of its tensors is read.

A published model has all tensors in model.safetensors, or in shards that model.safetensors.index.json lists. A
checkpoint has them in the files that run.json lists. Opening a folder reads only headers. Folders are not trusted: the
index may name only files in its own folder, and must agree with all headers. The files of a published model may be
symbolic links, as in the cache of huggingface_hub. Pickles are refused.
"""

import math
import os
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..data import DataFile
from ..data.files import FileStatus, sync
from ..data.stores import entry_of, exists, fetch, read, url_of
from ..data.strict_json import read_file, reading
from ..messages import plural, printable, quoted
from .manifest import Manifest, check_file_names

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "F8_E8M0": torch.float8_e8m0fnu, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
"""The dtypes of the format, except those of less than a byte, F4 and F6."""

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library
_MAX_DIMS = 64  # of a tensor of torch
_GIT_LFS = b"version "  # the first bytes of the text that git checks out without git-lfs
Announce = Callable[[str], object]
"""Called with the next operation on the disk, and with "" before the rank waits for others."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor is stored. start: its first byte in `file`. status: of the file, unless it is on a store."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    file: Path
    start: int
    status: FileStatus | None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors of a file in the order of their bytes.

    Raises ValueError, which names the file, and StorageError.
    """
    if (url := url_of(path)) is None:
        with DataFile(path) as file, reading(path):
            return _entries(path, path, file.read(0, min(file.size, _LENGTH_BYTES)), file.size, file.status)
    entry = entry_of(path)
    assert entry is not None
    start = read(url, 0, min(entry.size, _LENGTH_BYTES), stamp=entry.stamp)
    stop = min(_LENGTH_BYTES + min(int.from_bytes(start, "little"), _MAX_HEADER), entry.size)
    header = read(url, len(start), stop, stamp=entry.stamp)
    with tempfile.NamedTemporaryFile() as sparse, reading(path):  # the library compares header and size of the file
        sparse.write(start + header)
        sparse.truncate(entry.size)
        sparse.flush()
        return _entries(Path(sparse.name), path, start, entry.size)


def _entries(
    local: Path, path: Path, first: bytes | bytearray, size: int, status: FileStatus | None = None
) -> dict[str, TensorEntry]:
    """The tensors of `path`, whose header is in the file `local`. first: its first bytes. Raises ValueError."""
    if first == _GIT_LFS:
        raise ValueError("it is a Git LFS pointer in place of the file: run git lfs pull")
    try:
        with safe_open(local, "pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            described = {name: (part.get_dtype(), part.get_shape()) for name, part in slices.items()}
    except SafetensorError as error:
        reason = printable(str(error).removeprefix("Error while deserializing header: "), 200)
        raise ValueError(
            f"it has {size:,} bytes, and is incomplete or not a safetensors file (the safetensors library: {reason})"
        ) from None
    for name, (dtype, shape) in described.items():
        if dtype not in DTYPES:
            raise ValueError(f"{quoted(name, 60)} has dtype {quoted(dtype, 20)}; supported are {', '.join(DTYPES)}")
        if len(shape) > _MAX_DIMS or math.prod(max(length, 1) for length in shape) >= 2**62:
            raise ValueError(f"{quoted(name, 60)} has shape {quoted(shape, 60)}, which torch cannot hold")
    start = size - sum(math.prod(shape) * DTYPES[dtype].itemsize for dtype, shape in described.values())  # no gaps
    entries = {}
    for name, (dtype, shape) in described.items():
        entries[name] = TensorEntry(DTYPES[dtype], tuple(shape), path, start, status)
        start += entries[name].nbytes
    return entries


def read_metadata(path: Path) -> dict[str, str]:
    """The texts in the header of a local file whose tensors `read_header` has found."""
    with safe_open(path, "pt") as opened:
        return opened.metadata() or {}


def read_entry(entry: TensorEntry) -> Tensor:
    """Return a tensor, as a new CPU tensor in the stored dtype. Raises ValueError if it cannot be read."""
    data = torch.empty(entry.nbytes, dtype=torch.uint8, device="cpu")
    with DataFile(entry.file, entry.status) as opened:
        opened.read_into(entry.start, data.numpy().data)
    return data.view(entry.dtype).reshape(entry.shape)


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], announce: Announce = lambda _: None,
    metadata: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Write a new file and sync it. metadata: texts for its header.

    Raises OSError, and ValueError for dtypes without a name.
    """
    parts, addresses = {}, set[int]()
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise ValueError(f"a safetensors file cannot store {tensor.dtype} of {quoted(name, 60)}")
        part = tensor.detach().cpu().contiguous()
        parts[name] = part.clone() if part.data_ptr() in addresses else part  # the library refuses two names of one
        addresses.add(part.data_ptr())
    announce(f"writing {path.name}")
    path.touch(exist_ok=False)
    mode = path.stat().st_mode & 0o777  # that of a new file; the library's files can be read by their owner alone
    try:
        save_file(parts, path, {"format": "pt", **(metadata or {})})
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(*(int(number[1]), os.strerror(int(number[1]))) if number else (str(error),)) from None
    path.chmod(mode)
    announce(f"syncing {path.name}")
    sync(path)


# ---- Folders ----


class TensorFolder:
    """The tensors of a folder with model.safetensors, or with shards and model.safetensors.index.json.

    checkpoint: the contents of run.json, which lists the files of a checkpoint.

    entries: where each tensor is stored, by name.

    Raises ValueError, in one line that names the file, if the folder has no such weights or a file is invalid.
    """

    def __init__(self, folder: Path, checkpoint: Manifest | None = None):
        self.folder = folder
        self._checksums = {name: file.crc32 for name, file in checkpoint.files.items()} if checkpoint else {}
        if checkpoint:
            headers = {name: read_header(folder / name) for name in self._checksums if name.endswith(".safetensors")}
        elif exists(folder / SINGLE_FILE):
            headers = {SINGLE_FILE: read_header(folder / SINGLE_FILE)}
        elif exists(folder / INDEX_FILE):
            headers = _read_shards(folder / INDEX_FILE)
        else:
            shown = printable(folder)
            way = f"AutoModelForCausalLM.from_pretrained({shown!r}).save_pretrained({shown + '-safetensors'!r})"
            raise ValueError(
                f"{shown} has neither {SINGLE_FILE} nor {INDEX_FILE}; pickles (.bin, .pt) can run code, so they are "
                f"not read: convert them with the transformers library, {way}"
            )
        self.entries: Mapping[str, TensorEntry] = {
            name: entry for entries in headers.values() for name, entry in entries.items()
        }

    def read(self, name: str) -> Tensor:
        """Return a tensor, as a new CPU tensor in the stored dtype.

        Raises ValueError for an unknown name and for a file that cannot be read.
        """
        if (entry := self.entries.get(name)) is None:
            raise ValueError(f"{printable(self.folder)} has no tensor {quoted(name)}")
        fetch(entry.file, self._checksums.get(entry.file.name))
        return read_entry(entry)


def _read_shards(index: Path) -> dict[str, dict[str, TensorEntry]]:
    """Read the headers of the files that an index lists. It must list every tensor of each, and no others.

    Its metadata is ignored: the total_size of many published checkpoints is wrong.
    """
    with reading(index):
        listed = msgspec.convert(read_file(index)["weight_map"], dict[str, str])
        names = dict.fromkeys(listed.values())
        check_file_names(names)
        if missing := [name for name in names if not exists(index.with_name(name))]:
            more = f", and {plural(len(missing) - 1, 'more file')}" if len(missing) > 1 else ""
            raise ValueError(
                f"it lists {printable(missing[0], 60)}{more}, not found: download or copy the folder again"
            )
    shards = {name: read_header(index.with_name(name)) for name in names}
    stored = {(name, file) for file, entries in shards.items() for name in entries}
    if wrong := stored ^ {*listed.items()}:
        name, file = min(wrong)
        problem = "has it, but it is not listed there" if (name, file) in stored else "does not have it"
        raise ValueError(f"cannot read {index}: of {quoted(name, 60)}, {file} {problem}")
    return shards
