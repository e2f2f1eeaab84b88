"""Read parts of a large file on a store, through a local cache of bounded size that the ranks of a machine share.

Training reads short windows anywhere in the file, but in an order that is known beforehand. So threads read the blocks
of the next windows ahead. A read that finds its block in the cache costs a local read; one that does not waits for the
store, and is counted. Blocks are files. The least recently used are removed when the cache is full.
"""

import hashlib
import os
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from ...errors import without_frames
from ...messages import printable
from .errors import StorageError
from .local_copies import base_folder, locked
from .store import Patience, info, read
from .urls import Url

BLOCK = 128 * 2**10
"""Bytes that are read from the store at once."""
_THREADS = 8
_LOCKS = 64
_CHECK_SECONDS = 60.0
_PATIENCE = Patience(300.0)


def block_cache(folder: str | None, limit: int, staging: str | None = None) -> "BlockCache":
    """The cache in a folder; None: a folder beside the other local files of URLs."""
    return BlockCache(Path(folder) if folder else base_folder(staging) / "data-cache", limit)


class BlockCache:
    """A folder of blocks with at most `limit` bytes, whatever the number of processes that use it.

    Raises ValueError if the folder cannot be created.
    """

    def __init__(self, folder: Path, limit: int):
        self.folder, self.limit = folder, limit
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"cannot create the data cache {printable(folder)}: {error.strerror}") from None

    def get(self, file: str, block: int, first: int, stop: int) -> bytes | None:
        """Bytes of a block from `first` to `stop`; None if the cache does not have it."""
        try:
            with (self.folder / file / str(block)).open("rb", buffering=0) as stored:
                os.utime(stored.fileno())
                return os.pread(stored.fileno(), stop - first, first)
        except FileNotFoundError:
            return None

    def has(self, file: str, block: int) -> bool:
        return (self.folder / file / str(block)).exists()

    def put(self, file: str, block: int, data: bytes) -> None:
        """Add a block. Raises OSError if the disk is full."""
        path = self.folder / file / str(block)
        path.parent.mkdir(exist_ok=True)
        with locked(self.folder / ".lock"):
            used = self._used() + len(data)
            if used > self.limit:
                used = self._remove_oldest(int(0.9 * self.limit) - len(data)) + len(data)
            (self.folder / ".used").write_text(str(used))  # first: after a kill, too large rather than too small
            partial = path.with_suffix(".part")
            partial.write_bytes(data)
            partial.replace(path)

    def lock_of(self, file: str, block: int) -> Path:
        """The lock under which a block is read from the store, so that only one process does."""
        return self.folder / f".lock-{_bucket(file, block)}"

    def _used(self) -> int:
        with suppress(OSError, ValueError):
            return int((self.folder / ".used").read_text())
        return sum(size for _, size, _ in self._blocks())

    def _blocks(self) -> list[tuple[int, int, Path]]:
        found = []
        for path in self.folder.glob("*/*"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found.append((status.st_mtime_ns, status.st_size, path))
        return sorted(found)

    def _remove_oldest(self, target: int) -> int:
        """Remove blocks until at most `target` bytes remain; returns how many do."""
        blocks = self._blocks()
        used = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            if used <= target:
                break
            path.unlink(missing_ok=True)
            used -= size
        return used


def _bucket(file: str, block: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{file}/{block}".encode(), digest_size=4).digest()) % _LOCKS


class RemoteFile:
    """A file on a store, with the interface of `DataFile`. waits: reads that had to wait for the store.

    path: what messages show. Raises StorageError if there is no such file.
    """

    def __init__(self, url: Url, path: Path, cache: BlockCache):
        entry = info(url)
        if entry is None:
            raise StorageError(f"{url}: there is no such file")
        self.url, self.path, self.cache, self.size, self.waits = url, path, cache, entry.size, 0
        self._entry, self._checked, self._changed = entry, time.monotonic(), ""
        self.name = hashlib.sha256(f"{url} {entry.size} {entry.stamp}".encode()).hexdigest()[:24]
        self._coming: dict[int, Future[bytes]] = {}
        self._lock = threading.Lock()
        self._wanted: queue.SimpleQueue[tuple[int, Future[bytes]]] = queue.SimpleQueue()
        self._threads = 0

    @property
    def identity(self) -> tuple[object, object]:
        """Tells files apart."""
        return "", str(self.url)

    def read(self, first: int, size: int) -> bytes:
        """Return exactly `size` bytes from offset `first`. Raises ValueError if they cannot be read."""
        try:
            return self._read(first, size)
        except StorageError as error:
            raise without_frames(ValueError(str(error))) from None

    def _read(self, first: int, size: int) -> bytes:
        stop, parts, waited = first + size, [], False
        missing = [block for block in _blocks(first, size) if not self.cache.has(self.name, block)]
        coming = {block: self._request(block) for block in missing}
        for block in _blocks(first, size):
            start = block * BLOCK
            low, high = max(first, start) - start, min(stop, start + BLOCK) - start
            part = None if block in coming else self.cache.get(self.name, block, low, high)
            if part is None:  # also if it was removed meanwhile
                waited = True
                part = (coming.get(block) or self._request(block)).result()[low:high]
            parts.append(part)
        self.waits += waited
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> list[Future[bytes]]:
        """Start to read the blocks of these ranges, each (first, size), unless the cache has them."""
        blocks = dict.fromkeys(block for part in ranges for block in _blocks(*part))
        return [self._request(block) for block in blocks if not self.cache.has(self.name, block)]

    def check_unchanged(self) -> None:
        """Raise ValueError if the file was found to be another one. It is compared from time to time."""
        if self._changed:
            raise without_frames(ValueError(self._changed))

    def close(self) -> None:
        """Nothing to do: no connection is open."""

    def _request(self, block: int) -> "Future[bytes]":
        with self._lock:
            if (coming := self._coming.get(block)) is not None:
                return coming
            future = self._coming[block] = Future()
            if self._threads < min(_THREADS, len(self._coming)):
                threading.Thread(target=self._work, daemon=True, name="read-ahead").start()
                self._threads += 1
        self._wanted.put((block, future))
        return future

    def _work(self) -> None:
        while True:
            block, future = self._wanted.get()
            try:
                data = self._load(block)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(data)
            with self._lock:
                self._coming.pop(block, None)

    def _load(self, block: int) -> bytes:
        start = block * BLOCK
        size = min(BLOCK, self.size - start)
        with locked(self.cache.lock_of(self.name, block)):
            data = self.cache.get(self.name, block, 0, size)  # another process may have read it
            if data is not None and len(data) == size:
                return data
            data = read(self.url, start, start + size, _PATIENCE)
            self._compare()
            with suppress(OSError):  # a full disk: the block is read again when it is needed
                self.cache.put(self.name, block, data)
        return data

    def _compare(self) -> None:
        if time.monotonic() - self._checked > _CHECK_SECONDS:
            self._checked = time.monotonic()
            now = info(self.url, _PATIENCE)
            if now is None or (now.size, now.stamp) != (self._entry.size, self._entry.stamp):
                self._changed = (
                    f"{self.url} was replaced while it was in use: do not change data in place; write another file"
                )


def _blocks(first: int, size: int) -> range:
    return range(first // BLOCK, -(-(first + size) // BLOCK)) if size else range(0)
