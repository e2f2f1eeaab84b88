"""Write files so that they are on the disk, in pieces, so that no single call waits long for it."""

import io
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PIECE = 16 * 2**20
"""Bytes that are written at once."""
SYNC = 256 * 2**20
"""A file is synced each time that it has grown by this many bytes, so that no single sync takes long."""


class SyncedFile(io.FileIO):
    """A file for one writer. before_piece: called before each piece. Errors name the file."""

    def __init__(self, path: str | os.PathLike, mode: str, before_piece: Callable[[], object] = lambda: None):
        super().__init__(path, mode)
        self._path, self._before_piece, self._written = os.fspath(path), before_piece, 0

    def write(self, data: Any) -> int:
        """Write all of `data`."""
        whole = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        with self._named_errors():
            for first in range(0, len(whole), PIECE):
                self._before_piece()
                self._write_piece(whole[first : first + PIECE])
        return len(whole)

    def sync_and_close(self) -> None:
        with self._named_errors(), self:
            os.fsync(self.fileno())

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None

    def _write_piece(self, piece: memoryview) -> None:
        while piece:
            count = os.write(self.fileno(), piece)
            piece, before, self._written = piece[count:], self._written, self._written + count
            if before // SYNC < self._written // SYNC:
                os.fsync(self.fileno())


def write_synced(path: Path, data: bytes) -> None:
    with SyncedFile(path, "w") as file:
        file.write(data)
        file.sync_and_close()


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
