"""Read files that others may write to, replace or remove, without waiting and without dying; write files safely.

Memory-mapping would be simpler, but a mapped page that has vanished, because the file was truncated or its disk failed,
kills the process by SIGBUS. `pread` reports an error instead, and is faster for the windows of a batch (32 windows of
1,024 uint16: 91 us, 170 us mapped).
"""

import errno
import fcntl
import os
import socket
import stat
import tempfile
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from ..errors import without_frames
from ..messages import printable

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class FileStatus:
    """Identifies a file under any name (device, inode), and shows whether it was written to (size, time in ns)."""

    device: int
    inode: int
    size: int
    modified: int

    @classmethod
    def of(cls, status: os.stat_result) -> "FileStatus":
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class FileError(ValueError):
    """A file cannot be read, or has changed. The message is one line that names it."""


class DataFile:
    """A regular file, open for reading, with the size that it had when it was opened.

    Nobody may write to it meanwhile, and `check_unchanged` finds out if somebody did. If another file takes its name,
    this one stays open.

    follow_links: whether `path` may be a symbolic link. Raises FileError if it cannot be read or is not a regular file,
    or if it has changed since its status was `expected`.
    """

    def __init__(self, path: Path, expected: FileStatus | None = None, follow_links: bool = True):
        self.path = path
        try:
            mode = os.stat(path, follow_symlinks=follow_links).st_mode
            if not stat.S_ISREG(mode):  # opening a device may have effects
                what = "a symbolic link" if stat.S_ISLNK(mode) else "not a regular file"
                raise FileError(f"cannot read {printable(path)}: it is {what}")
            # O_NONBLOCK: never wait for the writer of a FIFO that has just taken the name.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.close = weakref.finalize(self, os.close, descriptor)
            self._descriptor, self.status = descriptor, FileStatus.of(os.fstat(descriptor))
        except OSError as error:
            raise FileError(f"cannot read {printable(path)}: {error.strerror}") from None
        self.size = self.status.size
        if expected and self.status != expected:
            raise self._changed(expected, self.status)

    def __enter__(self) -> "DataFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, first: int, size: int) -> bytearray:
        """Return exactly `size` bytes from offset `first`. Raises FileError if they cannot be read."""
        self.read_into(first, memoryview(buffer := bytearray(size)))
        return buffer

    def stream(self) -> BinaryIO:
        """A stream of the content from its start, for libraries. Use one at a time, while this file is open."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return open(self._descriptor, "rb", buffering=1 << 17, closefd=False)

    def read_into(self, first: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes from offset `first`, without a copy. Raises FileError like `read`."""
        try:
            while buffer and (count := os.preadv(self._descriptor, [buffer], first)):
                first, buffer = first + count, buffer[count:]
        except OSError as error:
            raise FileError(f"cannot read {printable(self.path)} at byte {first}: {error.strerror}") from None
        if buffer:
            self.check_unchanged()
            raise FileError(f"cannot read {printable(self.path)}: it ends at byte {first}, before its size")

    def check_unchanged(self) -> None:
        """Raise FileError if the file was written to since it was opened."""
        now = FileStatus.of(os.fstat(self._descriptor))
        if now != self.status:
            raise self._changed(self.status, now)

    def _changed(self, before: FileStatus, now: FileStatus) -> Exception:
        size = f"{before.size} bytes"
        sizes = size if now.size == before.size else f"{size} then, {now.size} now"
        what = f"{printable(self.path)} was written to while it was in use ({sizes})"
        return without_frames(FileError(f"{what}: do not change data in place; write another file, then rename it"))


def divide(sizes: Mapping[Key, float], limit: float) -> list[list[Key]]:
    """Divide items into files of at most `limit` bytes, in their order. A larger item gets its own file."""
    files: list[list[Key]] = [[]]
    filled = 0.0
    for key, size in sizes.items():
        if files[-1] and filled + size > limit:
            files.append([])
            filled = 0.0
        files[-1].append(key)
        filled += size
    return files


def make_folder(folder: Path, shown: str) -> None:
    """Create a folder. Raises ValueError, "cannot write to SHOWN: ...", if no file can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write to {shown}: {error.strerror}") from None


# ---- Files that survive a loss of power ----


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it. Raises OSError, which names the file."""
    try:
        path.write_bytes(data)
        sync(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


@contextmanager
def replacing(path: Path, suffix: str = "") -> Iterator[Path]:
    """A new path beside `path`. The file that is written there takes the name of `path`, or is removed on an error.

    suffix: of its name, if only one process writes it; the next one then removes what a killed process has left.
    """
    part = path.with_name(f".{path.name}.{suffix or uuid.uuid4().hex}")
    try:
        part.unlink(missing_ok=True)
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def replace_file(path: Path, data: bytes) -> None:
    """Write all of `data` into a file, or leave the file as it is. Raises OSError."""
    with replacing(path) as part:
        write_synced(part, data)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Locks ----
#
# Folders with one writer: a second run, export or preparation would break what the first one writes.
#
# A folder that somebody reads may have a shared lock, which keeps its writer from removing it.
#
# The lock is `flock` on a file. The kernel releases it when the process dies. It holds for all machines if NFS or
# Lustre is mounted with locks. Object stores have no locks: there, it holds for the processes of one machine. If two
# machines write the same checkpoint, its files do not match its checksums, and it is skipped.
#
# The filelock library, on which torch depends, does not say who holds a lock, and does not free it while a child of a
# killed process is running.

LOCK_FILE = ".lock"
GRACE = 2.0
"""Seconds to wait for a lock: a process that was just killed may still be ending."""
LOST = 120.0
"""Seconds after which a file server has released the locks of a machine that was lost."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderInUseError(ValueError):
    """Another process writes to the folder."""


@contextmanager
def only_writer(folder: Path, lock_file: Path, wait: float | None = None) -> Iterator[None]:
    """Hold the lock of `folder` in `lock_file`. If the folder stands for a URL, it holds on this machine only.

    Raises FolderInUseError if another process still has it after `wait` seconds (None: GRACE), and ValueError if the
    lock file cannot be created.
    """
    made = [parent for parent in lock_file.parents if not parent.exists()]
    end = time.monotonic() + (GRACE if wait is None else wait)
    try:
        lock_file.parent.mkdir(parents=True, exist_ok=True)
        while (descriptor := try_lock(lock_file)) is None:
            if time.monotonic() >= end:
                raise _in_use(folder, lock_file)
            time.sleep(0.1)
    except OSError as error:
        why = "it is not a folder" if isinstance(error, FileExistsError) else error.strerror
        raise ValueError(f"cannot write to {printable(folder)}: {why}; use another folder") from None
    held = [descriptor]
    # A child that outlives this process must not keep the lock.
    os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)
    try:
        with suppress(OSError):  # a full disk
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock_file.unlink(missing_ok=True)
        with suppress(OSError):  # also remove a folder in which nothing was written
            for parent in made:
                parent.rmdir()
        os.close(held.pop())


def try_lock(path: Path, kind: int = fcntl.LOCK_EX, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """A descriptor that holds a lock on a file until it is closed, or the process dies.

    None if another process has the lock, or has just removed the file. kind: LOCK_EX, or LOCK_SH for one that others
    may share. flags: with which the file is opened. Raises OSError.
    """
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return descriptor
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
        return descriptor
    os.close(descriptor)  # it has just been removed
    return None


def _in_use(folder: Path, lock_file: Path) -> FolderInUseError:
    written = lock_file.read_bytes() if lock_file.exists() else b""
    who = printable(written.decode(errors="replace") or "another process", 100)
    return FolderInUseError(
        f"{printable(folder)} is being written by {who}: wait until it ends, stop it, or use another folder"
    )
