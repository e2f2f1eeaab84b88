"""Lines of JSON, each a document, in .jsonl files and in those compressed with gzip or Zstandard."""

import gzip
import io
import json
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, BinaryIO, TypeVar

from ..messages import printable, quoted
from . import text_files
from .files import DataFile
from .rows import RowError, TextField, damaged

T = TypeVar("T")
NEWLINE = b"\n"
FEED_BYTES = 1 << 10  # compressed bytes at a time; 1 KiB of Zstandard expands to at most 32 MiB
LARGEST_WINDOW = 1 << 31  # of `zstd --long=31`
_NEVER = 1 << 62  # a place after the end of every file


class JsonLines:
    """A `RowReader`. Places are bytes of the uncompressed file."""

    def __init__(self, file: DataFile, ending: str, field: TextField):
        self._file, self._field = file, field
        stream: Any = gzip.GzipFile(fileobj=as_stream(file)) if ending.endswith("gz") else as_stream(file)
        self._bytes = _Zstandard(file) if ending.endswith("zst") else _Streamed(file, stream)
        self._lines: deque[bytes] = deque()
        self._parts: list[bytes] = []  # of a line whose end was not read yet
        self._next = self._done = 0  # where the next line starts; before this place, all lines were read

    def texts(self, first: int, stop: int | None) -> Iterator[str]:
        for number, line in enumerate(self._read_lines(first, stop), 1):
            try:
                yield _text(line, self._field) if line.strip() else ""
            except ValueError as error:
                raise RowError(printable(self._file.path), number, str(error)) from None

    def measure(self, range_bytes: int) -> tuple[int, int]:
        return self._bytes.size(), range_bytes

    def _read_lines(self, first: int, stop: int | None) -> Iterator[bytes]:
        if first < self._done:
            self._seek(first)
        self._done = _NEVER  # if the caller stops in the middle, the next range is read anew
        self._skip(first)
        while (stop is None or self._next < stop) and self._has_line(_NEVER if stop is None else stop - self._next):
            line = self._lines.popleft()
            self._next += len(line) + 1
            yield line
        self._file.check_unchanged()
        self._done = self._next if stop is None else stop

    def _seek(self, first: int) -> None:
        """Continue at the byte before `first`, which belongs to the line before, or at the start."""
        self._lines.clear()
        self._parts.clear()
        self._next = max(first - 1, 0)
        self._bytes.seek(self._next)

    def _skip(self, first: int) -> None:
        """Skip the lines that start before `first`."""
        while self._next < first:
            if not self._lines and self._bytes.at < first - 1:
                self._seek(first)
            if not self._has_line(first - self._next):
                return
            self._next += len(self._lines.popleft()) + 1

    def _has_line(self, wanted: int) -> bool:
        """Whether there is another line. Reads until its end, about `wanted` bytes at a time."""
        while not self._lines:
            if not self._fill(wanted):
                return bool(self._lines)
        return True

    def _fill(self, wanted: int) -> bool:
        """Read about `wanted` bytes. False at the end of the file, when the last line is complete."""
        block = self._bytes.read(max(min(wanted, text_files.BLOCK_BYTES), 1 << 12))
        if not block:
            if self._parts:
                self._lines.append(b"".join(self._parts))
                self._parts.clear()
            return False
        first, *others = block.split(NEWLINE)
        self._parts.append(first)
        for line in others:
            self._lines.append(b"".join(self._parts))
            self._parts = [line]
        return True


class _Streamed:
    """The uncompressed bytes of a file, from a stream that can seek."""

    def __init__(self, file: DataFile, stream: BinaryIO):
        self._file, self._stream = file, stream

    @property
    def at(self) -> int:
        """The place of the next byte."""
        return self._stream.tell()

    def seek(self, first: int) -> None:
        self._read(lambda: self._stream.seek(first))

    def read(self, size: int) -> bytes:
        """The next bytes: at least one, and `size` or somewhat more; b"" at the end."""
        return self._read(lambda: self._stream.read(size))

    def size(self) -> int:
        return self._read(lambda: self._stream.seek(0, io.SEEK_END))

    def _read(self, operation: Callable[[], T]) -> T:
        try:
            return operation()
        except (EOFError, OSError, zlib.error) as error:
            raise damaged(self._file.path, error) from None


class _Zstandard:
    """Like `_Streamed`, for frames one after the other. The library's own stream takes a truncated frame for a
    complete one. To go back, it starts again.
    """

    def __init__(self, file: DataFile):
        self._file, self._library = file, _zstandard(file)
        self._restart()

    def seek(self, first: int) -> None:
        if first < self.at:
            self._restart()
        while self.at < first and (block := self.read(text_files.BLOCK_BYTES)):
            if self.at > first:
                self._rest = block[len(block) - (self.at - first) :] + self._rest
                self.at = first

    def read(self, size: int) -> bytes:
        block, self._rest = self._rest or self._decompress(size), b""
        self.at += len(block)
        return block

    def size(self) -> int:
        while self.read(text_files.BLOCK_BYTES):
            pass
        return self.at

    def _restart(self) -> None:
        self.at, self._rest = 0, b""
        self._frame: Any = None
        self._first = 0  # the place in the file of the next compressed byte
        self._input, self._input_first = b"", 0  # what was read of the file, and from where

    def _decompress(self, size: int) -> bytes:
        parts, found = [], 0
        while found < size and (feed := self._next_input()):
            if self._frame is None:
                self._frame = self._library.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj()
            try:
                parts.append(self._frame.decompress(feed))
            except self._library.ZstdError as error:
                raise damaged(self._file.path, error) from None
            found += len(parts[-1])
            self._first += len(feed)
            if self._frame.eof:
                self._first -= len(self._frame.unused_data)
                self._frame = None
        if not found and self._frame is not None:
            raise damaged(self._file.path, "the compressed file is truncated")
        return b"".join(parts)

    def _next_input(self) -> bytes:
        """At most FEED_BYTES of the file; b"" at its end."""
        if not 0 <= self._first - self._input_first < len(self._input):
            self._input = self._file.read(self._first, min(FEED_BYTES << 6, self._file.size - self._first))
            self._input_first = self._first
        first = self._first - self._input_first
        return self._input[first : first + FEED_BYTES]


class _Stream(io.RawIOBase):
    """A `DataFile` as a stream, for libraries that read one."""

    def __init__(self, file: DataFile):
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(min(len(view), self._file.size - self._at), 0)
        self._file.read_into(self._at, view[:count])
        self._at += count
        return count


def as_stream(file: DataFile) -> io.BufferedReader:
    """The file as a binary stream with a buffer."""
    return io.BufferedReader(_Stream(file), 1 << 17)


def _zstandard(file: DataFile) -> Any:
    try:
        return import_module("zstandard")
    except ImportError:
        raise ValueError(
            f"reading {printable(file.path)} needs the zstandard library: pip install 'moe-dualpipe[data]'"
        ) from None


def _text(line: bytes, field: TextField) -> str:
    """The text of one line. Raises ValueError; the caller adds file and line."""
    try:
        value = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 at byte {error.start}: {error.reason}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {printable(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {_kind(value)}")
    if field.name not in value:
        raise field.missing(list(value))
    text = value[field.name]
    if not isinstance(text, str):
        raise ValueError(f"field {quoted(field.name)} must be a string, got {_kind(text)}")
    return field.check(text)


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
