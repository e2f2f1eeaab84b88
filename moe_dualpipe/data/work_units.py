"""Divide the documents of all sources into parts, which several processes read and encode.

The parts depend only on the files, never on the number of processes, and each one can be read by itself. Their results,
put together in order, are what one process would write. About a MiB of text each: short enough to divide the work
evenly and to lose little when a run is killed, and long enough that handing them out costs nothing.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from .files import DataFile, FileStatus
from .open_rows import open_rows
from .rows import RowReader, TextField, row_format
from .text_files import BLOCK_BYTES, TextChunk, read_text

PART_BYTES = 1 << 20
MAX_FILES = 1000  # in a part


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file, and what shows that it has changed."""

    path: Path
    status: FileStatus

    @property
    def num_blocks(self) -> int:
        return -(-self.status.size // BLOCK_BYTES)


@dataclass(frozen=True, slots=True)
class WholeFiles:
    """Text files, each a document."""

    files: tuple[SourceFile, ...]

    @property
    def disk_bytes(self) -> int:
        """The bytes of the files that belong to this part."""
        return sum(file.status.size for file in self.files)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks `first` to `stop` of a long text file, which is one document."""

    file: SourceFile
    first: int
    stop: int

    @property
    def disk_bytes(self) -> int:
        return min(self.stop * BLOCK_BYTES, self.file.status.size) - self.first * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that start from `first` to `stop`, of `size`, in the unit of the file's `RowReader`."""

    file: SourceFile
    first: int
    stop: int
    size: int

    @property
    def disk_bytes(self) -> int:
        return self.file.status.size * self.stop // self.size - self.file.status.size * self.first // self.size


WorkUnit = WholeFiles | Blocks | Rows


class WorkUnitReader:
    """Reads parts. A file of rows stays open, because the next part is often a later one of the same file.

    same_machine: whether the files were found on this machine. On others they have the same sizes and times, but not
    the same devices and inodes.
    """

    def __init__(self, field: TextField, same_machine: bool = True):
        self._field, self._same_machine = field, same_machine
        self._open: tuple[SourceFile, RowReader] | None = None
        self.rows = 0  # that the last part had; 0 for text files

    def chunks(self, part: WorkUnit) -> Iterator[TextChunk]:
        """The text of a part. A document may continue in the next part if this one is `Blocks`.

        Raises RowError for an invalid row, counted from the start of the part, and ValueError if a file has changed.
        """
        self.rows = 0
        match part:
            case WholeFiles(files):
                for file in files:
                    with self.open_file(file) as opened:
                        yield from read_text(opened)
            case Blocks(file, first, stop):
                with self.open_file(file) as opened:
                    yield from read_text(opened, first, stop)
            case Rows(file, first, stop):
                for text in self.open(file).texts(first, stop):
                    self.rows += 1
                    if text:
                        yield TextChunk(text, ends_document=True)

    def open_file(self, file: SourceFile) -> DataFile:
        """Raises ValueError if the file cannot be read, or has changed since it was found."""
        expected = file.status
        if not self._same_machine:
            with DataFile(file.path) as found:
                expected = replace(expected, device=found.status.device, inode=found.status.inode)
        return DataFile(file.path, expected)

    def open(self, file: SourceFile) -> RowReader:
        if self._open is None or self._open[0] != file:
            self._open = None  # closes it
            self._open = file, open_rows(self.open_file(file), self._field)
        return self._open[1]


def has_known_size(file: SourceFile) -> bool:
    """Whether a file can be divided without reading it."""
    return row_format(file.path) in ("", ".jsonl")


def divide(files: Iterable[SourceFile], measured: Iterable[tuple[int, int]], part_bytes: int) -> Iterator[WorkUnit]:
    """Divide the files into parts of about `part_bytes` of text.

    measured: for each file without a known size, in order: the size and that of a part, as `RowReader.measure` returns.
    """
    sizes, group, group_bytes = iter(measured), list[SourceFile](), 0
    blocks = max(part_bytes // BLOCK_BYTES, 1)
    for file in files:
        is_text = not row_format(file.path)
        if is_text and file.num_blocks <= blocks:
            group.append(file)
            group_bytes += file.status.size
            if group_bytes < part_bytes and len(group) < MAX_FILES:
                continue
        if group:
            yield WholeFiles(tuple(group))
            group, group_bytes = [], 0
        if is_text and file.num_blocks > blocks:
            for first in range(0, file.num_blocks, blocks):
                yield Blocks(file, first, min(first + blocks, file.num_blocks))
        elif not is_text:
            size, step = (file.status.size, part_bytes) if has_known_size(file) else next(sizes)
            for first in range(0, size, step):
                yield Rows(file, first, min(first + step, size), size)
    if group:
        yield WholeFiles(tuple(group))
