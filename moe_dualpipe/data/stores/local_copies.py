"""Local folders that stand for URLs.

The rest of the program works with paths. So each URL gets a local folder, and a path in this folder stands for the same
path below the URL. Messages show the URLs. There are two kinds of folders:

    copies    what is read: filled on demand, shared by the processes of this machine, and used again by later ones
    staged    what a run writes, before it is uploaded; not removed, because a restarted run continues there

hf:// is only read, and has neither: huggingface_hub keeps its own copies.
"""

import hashlib
import os
import stat
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ...messages import printable, show_as
from .urls import StorageError, Url, is_url, storage_error

_STANDS_FOR: dict[Path, Url] = {}
_COPIES, _HUB = "copies", "hf://"


def local_path(text: str | os.PathLike[str]) -> Path:
    """The path of what a user named: itself, or the folder of copies of a URL. Reads nothing from the store.

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
        given = str(staged)
    url = Url(given)
    return _register(base_folder(None) / _COPIES / _name(url), url)


def staged_folder(url: Url, staging: str | None = None) -> Path:
    """The folder in which a run writes what it uploads to `url`. Raises ValueError if it cannot be created."""
    return _register(base_folder(staging) / "staged" / _name(url), url)


def output_folder(text: str, staging: str | None = None) -> Path:
    """The folder to write what a user named: itself, or the staged folder of a URL. Raises ValueError."""
    if text.startswith(_HUB):
        raise ValueError(f"{printable(text)} can only be read: write to a folder, s3://, gs:// or az://")
    return staged_folder(Url(text), staging) if is_url(text) else Path(text.removeprefix("file://"))


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
    """What huggingface_hub has downloaded of a file, a folder or a glob. Raises StorageError."""
    try:
        from huggingface_hub import HfFileSystem, snapshot_download

        found: Any = HfFileSystem().resolve_path(str(url))
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
    show_as(str(folder), str(url))
    return folder


def _name(url: Url) -> str:
    short = "".join(c if c.isalnum() or c in "-_." else "-" for c in url.name)[:40]
    return f"{short}-{hashlib.sha256(url.text.encode()).hexdigest()[:16]}"


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
