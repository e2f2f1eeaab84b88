"""The list of a folder's files, with their sizes and checksums, and the check that the files match it.

    run.json          of a checkpoint: the step, the model, and size and CRC-32 of every other file
    checksums.json    of an export (weights.py): size and CRC-32 of every other file

Each has a CRC-32 of its own fields. Every field is checked when it is read. The checksums detect damage, not forgery:
safety never depends on them.
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

RUN_FILE, EXPORT_FILE = "run.json", "checksums.json"

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
    """The contents of run.json or checksums.json. Equal checksums mean equal files.

    id: differs for two checkpoints of the same step, also if they are equal.
    """

    step: int
    model: Mapping[str, Any]
    files: Mapping[str, FileChecksum]
    id: str = ""

    @property
    def checksum(self) -> int:
        return _checksum(asdict(self))

    def encode(self) -> bytes:
        return json.dumps({**asdict(self), "checksum": self.checksum}, indent=2).encode()


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


# ---- Reading: no field is trusted ----


def read_manifest(folder: Path, name: str = RUN_FILE) -> Manifest:
    """Read run.json or checksums.json. Raises ValueError if it is missing, invalid or damaged."""
    with reading(path := folder / name):
        saved = read_file(path, follow_links=name == EXPORT_FILE)
        if saved.pop("checksum") != _checksum(saved):
            raise ValueError("its checksum does not match")
        if name == EXPORT_FILE:
            saved = {"step": 0, "model": {}, **saved}
        files = {
            valid_file_name(file): FileChecksum(valid_count(entry["length"]), valid_count(entry["crc32"]))
            for file, entry in saved["files"].items()
        }
        return Manifest(valid_count(saved["step"]), {**saved["model"]}, files, str(saved.get("id", "")))


def verify_export(folder: Path) -> int:
    """Compare every file of an export with checksums.json, and return a checksum of all.

    Returns 0 for a folder without checksums.json: an older export, or one from elsewhere. Raises ValueError, naming the
    first file that differs, and if checksums.json is damaged.
    """
    if not (folder / EXPORT_FILE).exists():
        return 0
    manifest = read_manifest(folder, EXPORT_FILE)
    for name, expected in manifest.files.items():
        if stores.exists(folder / name):
            stores.fetch(folder / name, expected.crc32)
    _verify_files(folder, manifest.files, follow_links=True)
    return manifest.checksum


def verify_checkpoint(checkpoint: Path) -> Manifest:
    """Compare every file of a checkpoint with run.json. Raises ValueError, naming the first file that differs.

    Reads all files once, at the speed of the disk or of CRC-32 (1 GB/s or more), whichever is slower. On a store, reads
    only small files, and compares the sizes of the others. Raises StorageError if a store cannot be read.
    """
    stores.open_folder(checkpoint)
    manifest = read_manifest(checkpoint)
    if ".metadata" in manifest.files:
        raise ValueError("an earlier version wrote it: convert it with examples/convert_checkpoint.py")
    _verify_files(checkpoint, manifest.files, follow_links=False)
    return manifest


def _verify_files(folder: Path, files: Mapping[str, FileChecksum], follow_links: bool) -> None:
    try:
        for name, expected in files.items():
            path = folder / name
            if (length := _size(path, follow_links)) != expected.length:
                raise ValueError(f"{name} has {length:,} bytes, expected {expected.length:,}")
            if (stores.url_of(path) is None or path.exists()) and FileChecksum.of_file(path) != expected:
                raise ValueError(f"{name} does not match its checksum")
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None


def _size(path: Path, follow_links: bool) -> int:
    """The size of a file. Raises ValueError if it is missing, not regular, or a link that could lead elsewhere."""
    try:
        size = stores.size_of(path)
        return check_regular(path, follow_links).st_size if size is None else size
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
