"""Read files that others may write to, replace or remove, without waiting and without dying; write files safely.

Memory-mapping would be simpler, but a mapped page that has vanished, because the file was truncated or its disk failed,
kills the process by SIGBUS. `pread` reports an error instead, and is faster for the windows of a batch (32 windows of
1,024 uint16: 91 us, 170 us mapped).
"""

import os
import stat
import uuid
import weakref
from collections.abc import Mapping
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


class DataFile:
    """A regular file, open for reading, with the size that it had when it was opened.

    Nobody may write to it meanwhile, and `check_unchanged` finds out if somebody did. If another file takes its name,
    this one stays open.

    Raises ValueError, which names the file, if it cannot be read or is not a regular file, or if it has changed since
    its status was `expected`.
    """

    def __init__(self, path: Path, expected: FileStatus | None = None):
        self.path = path
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a device may have effects
                raise ValueError(f"cannot read {printable(path)}: it is not a regular file")
            # O_NONBLOCK: never wait for the writer of a FIFO that has just taken the name.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.close = weakref.finalize(self, os.close, descriptor)
            self._descriptor, self.status = descriptor, FileStatus.of(os.fstat(descriptor))
        except OSError as error:
            raise ValueError(f"cannot read {printable(path)}: {error.strerror}") from None
        self.size = self.status.size
        if expected and self.status != expected:
            raise self._changed(expected, self.status)

    def __enter__(self) -> "DataFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, first: int, size: int) -> bytearray:
        """Return exactly `size` bytes from offset `first`. Raises ValueError if they cannot be read."""
        self.read_into(first, memoryview(buffer := bytearray(size)))
        return buffer

    def stream(self) -> BinaryIO:
        """A stream of the content from its start, for libraries. Use one at a time, while this file is open."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        return open(self._descriptor, "rb", buffering=1 << 17, closefd=False)

    def read_into(self, first: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes from offset `first`, without a copy. Raises ValueError like `read`."""
        try:
            while buffer and (count := os.preadv(self._descriptor, [buffer], first)):
                first, buffer = first + count, buffer[count:]
        except OSError as error:
            raise ValueError(f"cannot read {printable(self.path)} at byte {first}: {error.strerror}") from None
        if buffer:
            self.check_unchanged()
            raise ValueError(f"cannot read {printable(self.path)}: it ends at byte {first}, before its size")

    def check_unchanged(self) -> None:
        """Raise ValueError if the file was written to since it was opened."""
        now = FileStatus.of(os.fstat(self._descriptor))
        if now != self.status:
            raise self._changed(self.status, now)

    def _changed(self, before: FileStatus, now: FileStatus) -> Exception:
        size = f"{before.size} bytes"
        sizes = size if now.size == before.size else f"{size} then, {now.size} now"
        what = f"{printable(self.path)} was written to while it was in use ({sizes})"
        return without_frames(ValueError(f"{what}: do not change data in place; write another file, then rename it"))


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


# ---- Files that survive a loss of power ----


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it. Raises OSError, which names the file."""
    try:
        path.write_bytes(data)
        sync(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write all of `data` into a file, or leave the file as it is. Raises OSError."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_synced(part, data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
