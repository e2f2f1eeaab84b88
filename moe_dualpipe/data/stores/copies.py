"""Copies of the files on a store, in the folder that stands for it (local_copies.py).

The small files of a folder are copied when it is opened, as the code that reads them expects. Large files are copied
when they are needed. The processes of a machine share the copies: the first copies, the others wait. A copy is used
until the file on the store changes.

The caches of fsspec, on which torch depends, copy whole files, too. But two processes may write into one copy, and no
checksum is compared.
"""

import os
import zlib
from collections.abc import Iterable
from pathlib import Path

from ..one_writer import open_locked
from ..synced_files import sync
from .local_copies import url_of
from .store import Entry, info, list_folder, read_parts
from .urls import StorageError, Url

SMALL = 64 * 2**20
"""The largest file that is copied when its folder is opened."""
_LARGE_SUFFIXES = (".safetensors", ".bin", ".metadata")
_opened: dict[Path, dict[str, Entry]] = {}


def open_folder(folder: Path, whole: bool = False) -> list[str]:
    """Copy the small files of a folder, or all, and note the sizes of all. Returns their names; [] for a local folder.

    Raises StorageError, and OSError for a full disk.
    """
    if (url := url_of(folder)) is None:
        return []
    listed = list_folder(url).items()
    entries = {name: entry for name, entry in listed if not entry.is_folder and name not in (".", "..")}
    _opened[folder] = entries
    drop(folder, {path.name for path in folder.glob("[!.]*") if path.is_file()} - entries.keys())
    for name, entry in entries.items():
        if whole or (entry.size <= SMALL and not name.endswith(_LARGE_SUFFIXES)):
            _copy(folder / name, url / name, entry, None)
    return [*entries]


def fetch(path: Path, crc32: int | None = None) -> Path:
    """Copy the file that `path` stands for, unless the copy is there. Returns `path`; ordinary paths are unchanged.

    crc32: the checksum that it must have. Raises StorageError, and ValueError for another checksum.
    """
    if (url := url_of(path)) is None:
        return path
    if (entry := entry_of(path)) is None:
        raise StorageError(f"{url}: there is no such file")
    _copy(path, url, entry, crc32)
    return path


def entry_of(path: Path) -> Entry | None:
    """What the store said of a file when its folder was opened, or says now; None if it is not there, or no URL."""
    if (url := url_of(path)) is None:
        return None
    return _opened[path.parent].get(path.name) if path.parent in _opened else info(url)


def drop(folder: Path, names: Iterable[str]) -> None:
    """Remove copies, to free the space. Does nothing for an ordinary folder."""
    for path in (folder / name for name in names if url_of(folder) is not None):
        path.unlink(missing_ok=True)
        _stamp_file(path).unlink(missing_ok=True)


def exists(path: Path) -> bool:
    """Whether there is a file, or a link, on this machine or on the store. Raises StorageError."""
    return os.path.lexists(path) if url_of(path) is None else entry_of(path) is not None


def _stamp_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.stamp")


def _copy(path: Path, url: Url, entry: Entry, crc32: int | None) -> None:
    stamp, found = _stamp_file(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(open_locked(path.with_name(f".{path.name}.lock"))):
        if path.exists() and stamp.exists() and stamp.read_text() == entry.stamp:
            return
        partial = path.with_name(f".{path.name}.part")
        with partial.open("wb") as file:
            for data in read_parts(url, 0, entry.size, stamp=entry.stamp):
                file.write(data)
                found = zlib.crc32(data, found)
        if crc32 not in (None, found):
            raise ValueError(f"{url} does not match its checksum")
        sync(partial)
        stamp.unlink(missing_ok=True)
        partial.replace(path)
        stamp.write_text(entry.stamp)
