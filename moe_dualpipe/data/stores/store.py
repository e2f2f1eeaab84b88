"""Calls to an object store, each with a time limit and, if its error may pass, repeated after growing pauses.

The libraries behind fsspec have limits and repetitions of their own, all different. Those of s3fs are switched off,
so that the number of attempts and the time they take are known here. A call that hangs is left behind in its thread.
"""

import os
import random
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from ...messages import plural, printable, unknown_name
from .errors import MissingError, StorageError, lasting_error, may_pass, missing_bucket
from .threads import call_in_thread
from .urls import Url

Result = TypeVar("Result")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 15.0  # seconds
_CONNECT, _READ = 10, 30  # seconds
_SLOWEST = 200_000  # bytes per second; a call may take the time for its bytes at this rate, in addition
_STAMPS = ("ETag", "etag", "md5Hash", "blob_id", "sha256", "LastModified", "last_modified", "updated", "created")
_jitter = random.Random()  # not the generator that a user's layer may use


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds. total: a call is repeated for so long. call: limit of one call, besides the time for its bytes."""

    total: float
    call: float = 40.0


QUICK = Patience(20.0, 20.0)
"""For what a person waits for, such as the start of a run."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A file or folder on a store. stamp: differs after the file was written again."""

    name: str
    size: int
    stamp: str
    is_folder: bool = False


def call(url: Url, operation: Callable[[Any, str], Result], patience: Patience = QUICK, nbytes: int = 0) -> Result:
    """Return `operation(filesystem, path)`. Raises StorageError, and the operation's own errors.

    nbytes: how many bytes it moves.
    """
    began, pause, attempts = time.monotonic(), _FIRST_PAUSE, 0
    while True:
        attempts += 1
        try:
            return _limited(lambda: operation(*_open(url)), patience.call + nbytes / _SLOWEST)
        except Exception as error:
            if isinstance(error, StorageError):
                raise
            if not may_pass(error):
                raise (lasting_error(url, error) or error) from None
            if time.monotonic() - began + pause > patience.total:
                seconds, reason = time.monotonic() - began, printable(str(error) or type(error).__name__, 300)
                raise StorageError(
                    f"{url}: cannot be reached: {reason} ({plural(attempts, 'attempt')} in {seconds:.0f} s)"
                ) from None
        time.sleep(pause * (0.5 + _jitter.random() / 2))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _limited(operation: Callable[[], Result], seconds: float) -> Result:
    """Run `operation` in a thread. Raises TimeoutError if it takes longer; the thread then ends with the process."""
    result = call_in_thread(operation, "storage")
    try:
        return result.result(seconds)
    except futures.TimeoutError:
        if result.done():
            raise  # of the operation itself
        raise TimeoutError(f"no answer within {seconds:.0f} s") from None


def _open(url: Url) -> tuple[Any, str]:
    filesystem = _filesystem(url.scheme, os.getpid())
    return filesystem, filesystem._strip_protocol(str(url))


@cache
def _filesystem(scheme: str, _pid: int) -> Any:
    """One for each process: connections do not survive a fork."""
    import fsspec

    if scheme not in fsspec.available_protocols():
        known = [name for name in ("s3", "gs", "hf", "az", "memory") if name in fsspec.available_protocols()]
        raise StorageError(str(unknown_name("kind of URL", scheme, known)))
    options: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("s3", "s3a"):
        retries = {"total_max_attempts": 1}
        limits = {"connect_timeout": _CONNECT, "read_timeout": _READ, "retries": retries, "max_pool_connections": 32}
        options["config_kwargs"] = limits
    filesystem: Any = fsspec.filesystem(scheme, **options)
    if scheme in ("s3", "s3a"):
        filesystem.retries = 1
    return filesystem


def _entry(described: Mapping[str, Any]) -> Entry:
    stamp = next((str(described[key]) for key in _STAMPS if described.get(key)), "")
    name = str(described["name"]).rstrip("/").rpartition("/")[2]
    return Entry(name, int(described.get("size") or 0), stamp, described.get("type") == "directory")


def list_folder(url: Url, patience: Patience = QUICK) -> dict[str, Entry]:
    """What is directly below a folder, by name; {} if there is nothing. Raises StorageError, also without a bucket."""

    def read_names(filesystem: Any, path: str) -> list[Mapping[str, Any]]:
        try:
            return filesystem.ls(path, detail=True)
        except FileNotFoundError as error:
            if missing_bucket(error):
                raise
            return []

    own = url.text.partition("://")[2]
    found = call(url, read_names, patience)
    entries = [_entry(one) for one in found if str(one["name"]).strip("/") != own.strip("/")]  # s3 lists a marker
    return {entry.name: entry for entry in entries}


def find_files(url: Url, patience: Patience = QUICK) -> dict[str, Entry]:
    """A file, all files below a folder, or those that match a glob: URL -> what it is. Raises StorageError."""

    def find(filesystem: Any, path: str) -> Mapping[str, Mapping[str, Any]]:
        if any(character in path for character in "*?["):
            return filesystem.glob(path, detail=True)
        return filesystem.find(path, detail=True)

    found = call(url, find, patience)
    start = url.text.partition("://")[0]
    files = sorted((name.strip("/"), one) for name, one in found.items() if one.get("type") == "file")
    return {f"{start}://{name}": _entry(one) for name, one in files}


def info(url: Url, patience: Patience = QUICK) -> Entry | None:
    """A file or folder; None if there is none. Raises StorageError."""
    try:
        return _entry(call(url, lambda filesystem, path: filesystem.info(path), patience))
    except MissingError:
        return None


def read(url: Url, first: int = 0, stop: int | None = None, patience: Patience = QUICK) -> bytes:
    """The bytes of a file from `first` to `stop`, exactly. Raises StorageError."""
    wanted = None if stop is None else stop - first

    def read_bytes(filesystem: Any, path: str) -> bytes:
        if wanted == 0:
            return b""
        data = filesystem.cat_file(path) if wanted is None else filesystem.cat_file(path, start=first, end=stop)
        if wanted is not None and len(data) != wanted:
            raise EOFError(f"got {len(data):,} of {wanted:,} bytes")
        return data

    return call(url, read_bytes, patience, wanted or 0)


def write(url: Url, data: bytes, patience: Patience = QUICK) -> None:
    """Write a small file. Raises StorageError."""
    call(url, lambda filesystem, path: filesystem.pipe_file(path, data), patience, len(data))


def delete(url: Url, patience: Patience = QUICK) -> None:
    """Remove a file, if it is there. Raises StorageError."""
    with suppress(MissingError):
        call(url, lambda filesystem, path: filesystem.rm_file(path), patience)


def delete_folder(url: Url, first: str = "", patience: Patience = QUICK) -> None:
    """Remove the files directly in a folder. first: the name of one that is removed before the others."""
    if first:
        delete(url / first, patience)
    for name in list_folder(url, patience):
        if name != first:
            delete(url / name, patience)
