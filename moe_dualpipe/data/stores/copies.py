"""Copies of files on a store, in the folder that stands for it (local_copies.py).

The small files of a folder are copied when it is opened, as the code that reads them expects. Large files are copied
when they are needed. The processes of one launch on a machine share the copies: the first copies, the others wait, and
compare its checksum. A copy that was cut or changed is made again.
"""

import errno
import os
import zlib
from collections.abc import Collection, Iterable
from pathlib import Path

from .errors import StorageError
from .local_copies import local_path, locked, url_of
from .store import Entry, find_files, glob_root, info, list_folder, read_parts
from .urls import Url

SMALL = 64 * 2**20
"""The largest file that is copied when its folder is opened."""
_LARGE_SUFFIXES = (".safetensors", ".bin", ".metadata")
_opened: dict[Path, dict[str, Entry]] = {}


def open_folder(folder: Path, names: Collection[str] | None = None) -> None:
    """Copy the small files of a folder, and note the sizes of all. Does nothing for an ordinary folder.

    names: copy only these. Raises StorageError.
    """
    if (url := url_of(folder)) is None:
        return
    listed = list_folder(url).items()
    entries = {name: entry for name, entry in listed if not entry.is_folder and name not in (".", "..")}
    _opened[folder] = entries
    for path in folder.glob("[!.]*"):  # copies of files that are not there any more
        if path.is_file() and path.name not in entries:
            drop(folder, [path.name])
    for name, entry in entries.items():
        wanted = not name.endswith(_LARGE_SUFFIXES) if names is None else name in names
        if wanted and entry.size <= SMALL:
            _copy(folder / name, url / name, entry, None)


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


def fetch_all(url: Url) -> Path:
    """Copy a file, all files below a folder, or those that match a glob. Returns what stands for `url`.

    Raises StorageError if there is nothing.
    """
    found, root = find_files(url), glob_root(url)
    if not found:
        raise StorageError(f"{url}: there is no such file or folder")
    if [*found] == [str(url)]:
        return fetch(local_path(str(url.parent)) / url.name)
    folder = local_path(str(root))
    for name, entry in found.items():
        below = name.removeprefix(f"{root}/")
        if ".." not in below.split("/"):
            _copy(folder / below, root / below, entry, None)
    return folder / str(url).removeprefix(str(root)).lstrip("/")


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


def size_of(path: Path) -> int | None:
    """The size of a file on a store, in a folder that was opened; None for an ordinary path.

    Raises FileNotFoundError if it is not there.
    """
    if url_of(path) is None:
        return None
    entry = _opened.get(path.parent, {}).get(path.name)
    if entry is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return entry.size


def exists(path: Path) -> bool:
    """Whether there is a file, or a link, on this machine or on the store. Raises StorageError."""
    return os.path.lexists(path) if url_of(path) is None else entry_of(path) is not None


def sizes_of(folder: Path) -> dict[str, int]:
    """The files in a folder, on this machine or on the store: name -> bytes. Raises OSError."""
    if (url := url_of(folder)) is None:
        return {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    return {name: entry.size for name, entry in sorted(list_folder(url).items()) if not entry.is_folder}


def _stamp_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.stamp")


def _copy(path: Path, url: Url, entry: Entry, crc32: int | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    stamp = _stamp_file(path)
    with locked(path.with_name(f".{path.name}.lock")):
        if path.exists() and stamp.exists() and stamp.read_text() == f"{entry.stamp} {entry.size} {_crc32(path)}":
            return
        stamp.unlink(missing_ok=True)
        partial, crc = path.with_name(f".{path.name}.part"), 0
        with partial.open("wb") as file:
            for data in read_parts(url, 0, entry.size, stamp=entry.stamp):
                file.write(data)
                crc = zlib.crc32(data, crc)
        if crc32 is not None and crc != crc32:
            partial.unlink()
            raise ValueError(f"{url} does not match its checksum")
        partial.replace(path)
        stamp.write_text(f"{entry.stamp} {entry.size} {crc}")


def _crc32(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
    return crc
