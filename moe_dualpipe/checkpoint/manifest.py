"""The description of a checkpoint's files in JSON, and the check that the files match it.

    run.json        step, model, size and CRC-32 of every other file, and a CRC-32 of all of these fields
    tensors.json    global name -> dtype, shape and file (tensor_folder.py)

Every field is checked when it is read. The checksums detect damage, not forgery: safety never depends on them.

An export (weights.py) has size and CRC-32 of its files in checksums.json, protected in the same way.
"""

import json
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..data import stores
from ..data.strict_json import check_regular, read_file
from ..messages import printable, quoted

RUN_FILE, TENSORS_FILE, EXPORT_FILE = "run.json", "tensors.json", "checksums.json"

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
        return cls(path.stat().st_size, _crc32(path))


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of run.json. Equal checksums mean equal checkpoints.

    id: differs for two checkpoints of the same step, also if they are equal.
    """

    step: int
    model: dict[str, Any]
    files: dict[str, FileChecksum]
    id: str = ""

    @property
    def checksum(self) -> int:
        return _checksum(self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value != ""}

    def encode(self) -> bytes:
        return _encode(self._fields)


def encode_checksums(files: Mapping[str, FileChecksum]) -> bytes:
    """The contents of checksums.json."""
    return _encode(_export_fields(files))


def _export_fields(files: Mapping[str, FileChecksum]) -> dict[str, Any]:
    return {"files": {name: asdict(file) for name, file in files.items()}}


def _encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps({**fields, "checksum": _checksum(fields)}, indent=2).encode()


def _checksum(fields: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


# ---- Reading: no field is trusted ----


def read_manifest(checkpoint: Path) -> Manifest:
    """Read run.json of a checkpoint. Raises ValueError if it is missing, invalid or damaged."""
    with reading(path := checkpoint / RUN_FILE):
        saved = read_file(path, follow_links=False)
        if not isinstance(model := saved["model"], dict):
            raise ValueError(f"its model is {quoted(model, 60)}")
        manifest = Manifest(valid_count(saved["step"]), model, _files(saved), str(saved.get("id", "")))
        _check(saved, manifest.checksum, manifest.files, TENSORS_FILE)
    return manifest


def verify_export(folder: Path, *required: str) -> int:
    """Compare every file of an export with checksums.json, and return the checksum of that file.

    Returns 0 for a folder without checksums.json: an older export, or one from elsewhere. Raises ValueError, naming the
    first file that differs, and if checksums.json is damaged or does not list all of `required`.
    """
    if not (path := folder / EXPORT_FILE).exists():
        return 0
    with reading(path):
        saved = read_file(path)
        files = _files(saved)
        checksum = _checksum(_export_fields(files))
        _check(saved, checksum, files, *required)
    for name, expected in files.items():
        if stores.exists(folder / name):
            stores.fetch(folder / name, expected.crc32)
    _verify_files(folder, files, follow_links=True)
    return checksum


def _files(saved: Mapping[str, Any]) -> dict[str, FileChecksum]:
    entries = saved["files"].items()
    return {
        valid_file_name(name): FileChecksum(valid_count(e["length"]), valid_count(e["crc32"])) for name, e in entries
    }


def _check(saved: Mapping[str, Any], checksum: int, files: Collection[str], *required: str) -> None:
    if saved["checksum"] != checksum:
        raise ValueError("its checksum does not match")
    if missing := [name for name in required if name not in files]:
        raise ValueError(f"it does not list {missing[0]}")


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
            if (length := size_of_file(folder, name, follow_links)) != expected.length:
                raise ValueError(f"{name} has {length:,} bytes, expected {expected.length:,}")
            if not _only_on_store(folder / name) and _crc32(folder / name) != expected.crc32:
                raise ValueError(f"{name} does not match its checksum")
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}") from None


def valid_file_name(value: Any) -> str:
    if not isinstance(value, str) or not _FILE_NAME.fullmatch(value) or not value.strip("."):
        raise ValueError(f"{quoted(value, 60)} is not a valid file name")
    return value


def _only_on_store(path: Path) -> bool:
    return stores.url_of(path) is not None and not path.exists()


def size_of_file(folder: Path, name: str, follow_links: bool = False) -> int:
    """The size of a file. Raises ValueError if it is missing, not regular, or a link that could lead elsewhere."""
    try:
        if (size := stores.size_of(folder / name)) is not None:
            return size
        return check_regular(folder / name, follow_links).st_size
    except FileNotFoundError:
        raise ValueError(f"{name} is missing") from None
    except ValueError as error:
        raise ValueError(f"{name} is refused: {error}") from None


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


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return crc
