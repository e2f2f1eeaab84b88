"""run.json of a checkpoint: the step, the model, and size and CRC-32 of every other file; and the check of these files.

safetensors has no checksums, and cannot list the other files. run.json has a CRC-32 of its own fields. Every field is
checked when it is read. The checksums detect damage, not forgery: safety never depends on them.
"""

import json
import re
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..data import stores
from ..data.strict_json import check_regular, read_file
from ..messages import printable, quoted

RUN_FILE = "run.json"

_FILE_NAME = re.compile(r"[\w.-]{1,200}", re.ASCII)  # no path separator: stays in the checkpoint's folder
_BLOCK = 2**22  # bytes read at a time


@dataclass(frozen=True, slots=True)
class FileChecksum:
    """Size and CRC-32 of a file."""

    length: int
    crc32: int

    @classmethod
    def of(cls, data: bytes) -> "FileChecksum":
        return cls(len(data), zlib.crc32(data))

    @classmethod
    def of_file(cls, path: Path) -> "FileChecksum":
        crc = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                crc = zlib.crc32(block, crc)
        return cls(path.stat().st_size, crc)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of run.json. Equal checksums mean equal files."""

    step: int
    model: Mapping[str, Any]
    files: Mapping[str, FileChecksum]

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
        files = {
            valid_file_name(file): FileChecksum(valid_count(entry["length"]), valid_count(entry["crc32"]))
            for file, entry in saved["files"].items()
        }
        return Manifest(valid_count(saved["step"]), {**saved["model"]}, files)


def verify_checkpoint(checkpoint: Path) -> Manifest:
    """Compare every file of a checkpoint with run.json. Raises ValueError, naming the first file that differs.

    Reads all files once, at the speed of the disk or of CRC-32 (1 GB/s or more), whichever is slower. On a store, reads
    only small files, and compares the sizes of the others. Raises StorageError if a store cannot be read.
    """
    stores.open_folder(checkpoint)
    manifest = read_manifest(checkpoint)
    if ".metadata" in manifest.files:
        raise ValueError("an earlier version wrote it: convert it with examples/convert_checkpoint.py")
    try:
        for name, expected in manifest.files.items():
            path = checkpoint / name
            if (length := _size(path)) != expected.length:
                raise ValueError(f"{name} has {length:,} bytes, expected {expected.length:,}")
            if (stores.url_of(path) is None or path.exists()) and FileChecksum.of_file(path) != expected:
                raise ValueError(f"{name} does not match its checksum")
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None
    return manifest


def _size(path: Path) -> int:
    """The size of a file. Raises ValueError if it is missing, not regular, or a link, which could lead elsewhere."""
    try:
        size = stores.size_of(path)
        return check_regular(path, follow_links=False).st_size if size is None else size
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing") from None
    except ValueError as error:
        raise ValueError(f"{path.name} is refused: {error}") from None


def valid_file_name(value: Any) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value) or not value.strip("."):
        raise ValueError(f"{quoted(value, 60)} is not a valid file name")
    return value


def valid_count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise ValueError(f"{quoted(value, 60)} is not a valid count")
    return value


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of reading an invalid file into ValueError("cannot read {path}: ...")."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or type(error).__name__}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else printable(error)
        raise ValueError(f"cannot read {path}: {reason}") from None
