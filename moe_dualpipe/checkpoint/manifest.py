"""run.json of a checkpoint: the step, the model, and size and CRC-32 of every other file; and the check of these files.

safetensors has no checksums, and cannot list the other files. run.json has a CRC-32 of its own fields. Every field is
checked when it is read. The checksums detect damage, not forgery: safety never depends on them.
"""

import json
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from ..data import stores
from ..data.files import DataFile
from ..data.strict_json import read_file, reading
from ..messages import quoted

RUN_FILE = "run.json"

_FILE_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)  # no path separator: stays in the checkpoint's folder
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_BLOCK = 2**22  # bytes read at a time


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """Size and CRC-32 of a file."""

    length: Count
    crc32: Count

    @classmethod
    def of(cls, data: bytes) -> "FileChecksum":
        return cls(len(data), zlib.crc32(data))

    @classmethod
    def of_file(cls, path: Path) -> "FileChecksum":
        """Raises FileError if it cannot be read, or is a link, which could lead elsewhere."""
        crc = 0
        with DataFile(path, follow_links=False) as file:
            for first in range(0, file.size, _BLOCK):
                crc = zlib.crc32(file.read(first, min(_BLOCK, file.size - first)), crc)
            return cls(file.size, crc)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of run.json. Equal checksums mean equal files."""

    step: Count
    model: dict[str, Any]
    files: dict[str, FileChecksum]

    @property
    def checksum(self) -> int:
        return _checksum(asdict(self))

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "checksum": self.checksum}, indent=2).encode()


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


# ---- Reading: no field is trusted ----


def read_manifest(folder: Path) -> Manifest:
    """Read run.json. Raises ValueError if it is missing, invalid or damaged."""
    with reading(path := folder / RUN_FILE):
        saved = read_file(path, follow_links=False)
        if saved.pop("checksum") != _checksum(saved):
            raise ValueError("its checksum does not match")
        manifest = msgspec.convert(saved, Manifest)
        check_file_names(manifest.files)
        return manifest


def verify_checkpoint(checkpoint: Path) -> Manifest:
    """Compare every file of a checkpoint with run.json. Raises ValueError, naming the first file that differs.

    Reads all files once, at the speed of the disk or of CRC-32 (1 GB/s or more), whichever is slower. On a store, reads
    only small files, and compares the sizes of the others. Raises StorageError if a store cannot be read.
    """
    stores.open_folder(checkpoint)
    manifest = read_manifest(checkpoint)
    if ".metadata" in manifest.files:
        raise ValueError("an earlier version wrote it: convert it with examples/convert_checkpoint.py")
    for name, expected in manifest.files.items():
        path = checkpoint / name
        if stores.url_of(path) is None or path.exists():
            found = FileChecksum.of_file(path)
        elif entry := stores.entry_of(path):
            found = FileChecksum(entry.size, expected.crc32)
        else:
            raise ValueError(f"{name} is missing")
        if found.length != expected.length:
            raise ValueError(f"{name} has {found.length:,} bytes, expected {expected.length:,}")
        if found != expected:
            raise ValueError(f"{name} does not match its checksum")
    return manifest


def check_file_names(names: Iterable[str]) -> None:
    """Raise ValueError for a name that could lead out of the folder."""
    for name in names:
        if not _FILE_NAME.fullmatch(name) or not name.strip("."):
            raise ValueError(f"{quoted(name, 60)} is not a valid file name")
