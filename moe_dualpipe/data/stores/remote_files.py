"""Read parts of files on a store: tensors of published weights, and the windows of token ids that training reads.

Nothing is written to the disk.
"""

from pathlib import Path

from ...errors import without_frames
from .copies import entry_of
from .local_copies import url_of
from .store import Entry, Patience, read_parts

_PATIENCE = Patience(300.0)


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
