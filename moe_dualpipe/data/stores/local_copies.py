"""Local folders that stand for URLs.

The rest of the program works with paths. So each URL gets a local folder, and a path in this folder stands for the same
path below the URL. Messages show the URLs. There are two kinds of folders:

    copies    what is read: filled on demand, shared by the processes of one launch, removed when the last of them ends
    staged    what a run writes, before it is uploaded; kept, because a run that is restarted continues there

hf:// is only read, and has neither: huggingface_hub keeps its own copies.
"""

import atexit
import fcntl
import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from ...messages import printable, show_as
from .urls import StorageError, Url, is_url, storage_error

_STANDS_FOR: dict[Path, Url] = {}
_COPIES, _HUB = "copies-", "hf://"


def local_path(text: str | os.PathLike[str], staging: str | None = None) -> Path:
    """The path of what a user named: itself, or the folder of copies of a URL. Reads nothing from the store.

    text: a path, a URL, or a path in a staged folder.

    staging: the folder for local files; None: see `base_folder`. Raises ValueError if it cannot be used.
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
    for folder, known in _STANDS_FOR.items():
        if known == url and _is_copy(folder):
            return folder
    return _register(_copies_folder(base_folder(staging)) / _name(url), url)


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
    return any(part.startswith(_COPIES) for part in path.parts)


def _register(folder: Path, url: Url) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"cannot create {folder} for files of {url}: {error.strerror}; use another staging folder"
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
        raise ValueError(f"{printable(folder)} is not a private folder of this user: name another staging folder")
    return folder


def _copies_folder(base: Path) -> Path:
    """The folder of copies of this launch: the ranks that one torchrun started share it."""
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    folder = base / f"{_COPIES}{launcher}"
    base.mkdir(parents=True, exist_ok=True)
    with locked(base / ".lock"):
        if folder not in {known.parent for known in _STANDS_FOR}:
            _remove_abandoned(base)
            folder.mkdir(exist_ok=True)
            descriptor = open_locked(folder / ".in-use", fcntl.LOCK_SH)
            atexit.register(_leave, base, descriptor)
    return folder


def _leave(base: Path, descriptor: int) -> None:
    os.close(descriptor)
    with suppress(OSError), locked(base / ".lock"):
        _remove_abandoned(base)


def _remove_abandoned(base: Path) -> None:
    """Remove the folders of copies that no process uses."""
    for folder in base.glob(f"{_COPIES}*"):
        with suppress(OSError):  # in use
            descriptor = open_locked(folder / ".in-use", fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            os.close(descriptor)


def open_locked(path: Path, kind: int) -> int:
    """A descriptor that holds a lock of this kind on a file until it is closed, or the process dies.

    Raises BlockingIOError for one that is held, if `kind` has LOCK_NB.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock among the processes of this machine. A process that dies loses it."""
    descriptor = open_locked(path, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(descriptor)
