"""Local folders that stand for URLs, and the copies of files in them.

The rest of the program works with paths. So each URL gets a local folder, and a path in this folder stands for the same
path below the URL. Messages show the URLs. There are two kinds of folders:

    copies    files to read: copied on demand, shared by the processes of this machine, and used again by later ones
    staged    files that a run writes, before they are uploaded; kept, because a restarted run continues there

hf:// is only read, and has neither: huggingface_hub keeps its own copies.

The small files of a folder are copied when it is opened, as the code that reads them expects; large files are copied
when they are needed. The first process of a machine copies, and the others wait. A copy is used until the file on the
store changes. The caches of fsspec, on which torch depends, copy whole files, too. But two processes may write into one
copy, and no checksum is compared.
"""

import hashlib
import os
import stat
import tempfile
import time
import zlib
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ...messages import printable, show_as
from ..files import replacing, sync, try_lock
from .store import StorageError, StoredFile, Url, info, is_url, list_folder, read_parts, storage_error

_STANDS_FOR: dict[Path, Url] = {}
_opened: dict[Path, dict[str, StoredFile]] = {}
"""The files of each folder that was opened, by name."""
SMALL = 64 * 2**20
"""The largest file that is copied when its folder is opened."""
_LARGE_SUFFIXES = (".safetensors", ".bin", ".metadata")
_COPIES, _HUB, _PAUSE_S = "copies", "hf://", 0.05


def local_path(text: str | os.PathLike[str]) -> Path:
    """Where to read a path or URL: the path itself, or the folder of copies. Reads nothing from the store.

    text: a path, a URL, or a path in a staged folder. Raises ValueError if there can be no folder of copies.
    """
    given = os.fspath(text)
    if given.startswith(_HUB):
        return _hub_copy(Url(given))
    if not is_url(given):
        path = Path(given.removeprefix("file://"))
        staged = None if _is_copy(path) else url_of(path)
        if staged is None:
            return path
        given = staged
    url = Url(given)
    return _register(base_folder(None) / _COPIES / _name(url), url)


def output_folder(text: str, staging: str | None = None) -> Path:
    """Where to write a path or URL: the path itself, or the staged folder, whose files are uploaded later.

    Raises ValueError if it cannot be created.
    """
    if text.startswith(_HUB):
        raise ValueError(f"{printable(text)} can only be read: write to a folder, s3://, gs:// or az://")
    if not is_url(text):
        return Path(text.removeprefix("file://"))
    return _register(base_folder(staging) / "staged" / _name(Url(text)), Url(text))


def url_of(path: Path) -> Url | None:
    """The URL that a local path stands for; None for an ordinary path."""
    for folder, url in _STANDS_FOR.items():
        if path == folder:
            return url
        if path.is_relative_to(folder):
            return url / path.relative_to(folder).as_posix()
    return None


@cache
def _hub_copy(url: Url) -> Path:
    """The local copy of a file, a folder or a glob, which huggingface_hub downloads. Raises StorageError."""
    try:
        from huggingface_hub import HfFileSystem, snapshot_download

        found: Any = HfFileSystem().resolve_path(url)
        inside = found.path_in_repo
        wanted = [inside, f"{inside}/*"] if inside else None
        folder = snapshot_download(
            found.repo_id, repo_type=found.repo_type, revision=found.revision, allow_patterns=wanted
        )
    except Exception as error:
        raise storage_error(url, error) or StorageError(f"{url}: {printable(error)}") from None
    return Path(folder, inside)


def _is_copy(path: Path) -> bool:
    return any(folder.parent.name == _COPIES and path.is_relative_to(folder) for folder in _STANDS_FOR)


def _register(folder: Path, url: Url) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot create {folder} for files of {url}: {error.strerror}: set TMPDIR to another folder"
        ) from None
    _STANDS_FOR[folder] = url
    show_as(str(folder), url)
    return folder


def _name(url: Url) -> str:
    short = "".join(c if c.isalnum() or c in "-_." else "-" for c in url.name)[:40]
    return f"{short}-{hashlib.sha256(url.encode()).hexdigest()[:16]}"


def base_folder(staging: str | None) -> Path:
    """The folder for local files. None: one of this user in the folder for temporary files.

    Raises ValueError if it belongs to another user, who could change the files.
    """
    if staging:
        return Path(staging).absolute()
    folder = Path(tempfile.gettempdir(), f"moe-dualpipe-{os.getuid()}").absolute()
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ValueError(f"{printable(folder)} is not a private folder of this user: set TMPDIR to another folder")
    return folder


# ---- Copies ----


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


def entry_of(path: Path) -> StoredFile | None:
    """Size and stamp of a file on a store, as listed when its folder was opened, or now. None if missing or local."""
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


def _copy(path: Path, url: Url, entry: StoredFile, crc32: int | None) -> None:
    stamp, found = _stamp_file(path), 0
    path.parent.mkdir(parents=True, exist_ok=True)
    while (lock := try_lock(path.with_name(f".{path.name}.lock"))) is None:
        time.sleep(_PAUSE_S)
    with open(lock):
        if path.exists() and stamp.exists() and stamp.read_text() == entry.stamp:
            return
        stamp.unlink(missing_ok=True)
        with replacing(path, "part") as part:
            with part.open("wb") as file:
                for data in read_parts(url, 0, entry.size, stamp=entry.stamp):
                    file.write(data)
                    found = zlib.crc32(data, found)
            if crc32 not in (None, found):
                raise ValueError(f"{url} does not match its checksum")
            sync(part)
        stamp.write_text(entry.stamp)
