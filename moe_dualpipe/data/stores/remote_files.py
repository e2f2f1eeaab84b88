"""Read parts of files on a store: tensors of published weights, and the windows of token ids that training reads.

The order of the windows is known in advance, so threads read those of the next steps into memory. A window that is not
there when it is needed is waited for, and counted (`waits`). Nothing is written to the disk.
"""

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

from ...errors import without_frames
from .copies import entry_of
from .local_copies import url_of
from .store import Entry, Patience, read_parts
from .threads import DaemonThreads

_PATIENCE = Patience(300.0)
_ahead = DaemonThreads(16)


class RangedFile:
    """A file on a store, with the interface of `DataFile`. Each request names the version that was opened.

    expected: the status of the version to open. Raises ValueError, which names the file, if it cannot be read, or if it
    is not that version any more.
    """

    def __init__(self, path: Path, expected: Entry | None = None):
        url = url_of(path)
        assert url is not None
        self.path, self._url = path, url
        try:
            found = expected or entry_of(path)
        except OSError as error:
            raise ValueError(str(error)) from None
        if found is None:
            raise ValueError(f"{url}: there is no such file")
        self.status, self.size = found, found.size

    @property
    def identity(self) -> tuple[object, object]:
        """Tells files apart."""
        return "", str(self._url)

    def __enter__(self) -> "RangedFile":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, first: int, size: int) -> bytes:
        """Return exactly `size` bytes from offset `first`. Raises ValueError if they cannot be read."""
        data = bytearray(size)
        self.read_into(first, memoryview(data))
        return bytes(data)

    def read_into(self, first: int, buffer: memoryview) -> None:
        """Fill a buffer of bytes from offset `first`. Raises ValueError like `read`."""
        try:
            for part in read_parts(self._url, first, first + len(buffer), _PATIENCE, self.status.stamp):
                buffer[: len(part)], buffer = part, buffer[len(part) :]
        except OSError as error:
            raise without_frames(ValueError(str(error))) from None

    def check_unchanged(self) -> None:
        """Nothing to do: each read compares the version."""


class RemoteFile(RangedFile):
    """A file of token ids on a store. waits: reads that had to wait for the store."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.waits, self._coming = 0, dict[tuple[int, int], Future[bytes]]()

    def read(self, first: int, size: int) -> bytes:
        """Like `RangedFile.read`. What was read ahead is given out once."""
        coming = self._coming.pop((first, size), None)
        self.waits += coming is None or not coming.done()
        return super().read(first, size) if coming is None else coming.result()

    def read_ahead(self, ranges: Iterable[tuple[int, int]]) -> list[Future[bytes]]:
        """Start to read these ranges, each (first, size), which are then read exactly so."""
        wanted = [part for part in ranges if part not in self._coming]
        self._coming |= {part: _ahead.submit(super(RemoteFile, self).read, *part) for part in wanted}
        return [self._coming[part] for part in wanted]
