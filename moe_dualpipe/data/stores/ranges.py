"""Read parts of a file on a store directly, without a copy: for the tensors of published weights."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .copies import entry_of
from .errors import StorageError
from .local_copies import url_of
from .store import Entry, read

_PART = 8 * 2**20
_THREADS = 4


class RangedFile:
    """A file on a store, with the interface of `DataFile`. It must stay as it is.

    Raises ValueError, which names the file, if it cannot be read, or if it has changed since its status was `expected`.
    """

    def __init__(self, path: Path, expected: Entry | None = None):
        url = url_of(path)
        assert url is not None
        self._url = url
        try:
            found = entry_of(path)
        except OSError as error:
            raise ValueError(str(error)) from None
        if found is None:
            raise ValueError(f"{url}: there is no such file")
        if expected and found != expected:
            raise ValueError(f"{url} was written to while it was in use: do not change data in place")
        self.status, self.size = found, found.size

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

        def read_part(start: int) -> None:
            stop = min(start + _PART, len(buffer))
            buffer[start:stop] = read(self._url, first + start, first + stop)

        try:
            with ThreadPoolExecutor(_THREADS) as pool:
                list(pool.map(read_part, range(0, len(buffer), _PART)))
        except StorageError as error:
            raise ValueError(str(error)) from None
