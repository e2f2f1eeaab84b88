"""Rows of tables, each a document, in .parquet and .arrow files. They are read in batches, with pyarrow.

.arrow files have one of two formats, with or without an index at the end; Hugging Face's `datasets` writes the latter.
"""

from collections.abc import Iterator
from importlib import import_module
from typing import Any

from ..messages import printable, quoted
from .files import DataFile
from .jsonl import as_stream
from .rows import RowError, TextField, damaged

BATCH_ROWS = 256
LARGEST_RANGE = 4096  # rows: the text of a repetitive column may be much longer than the column in the file
ARROW_MAGIC = b"ARROW1"


class Table:
    """A `RowReader`. Places are numbers of rows."""

    def __init__(self, file: DataFile, field: TextField):
        self._file, self._field, self._library = file, field, _pyarrow(file)
        self._at = 0  # the first row of the rest of the batches
        self._rest: Any = None  # of the batch that was read last
        self._batches = self._call(self._open, 0)

    def texts(self, first: int, stop: int | None) -> Iterator[str]:
        if first < self._at:
            self._at, self._rest = 0, None
            self._batches = self._call(self._open, first)
        number = 0
        while stop is None or self._at < stop:
            if self._rest is None or not len(self._rest):
                self._rest = self._call(next, self._batches, None)
                if self._rest is None:
                    break
            skipped = min(max(first - self._at, 0), len(self._rest))
            taken = len(self._rest) if stop is None else min(len(self._rest), stop - self._at)
            rows, self._rest = self._rest[skipped:taken], self._rest[taken:]
            self._at += taken
            for text in self._strings(rows, number):
                number += 1
                yield text
        self._file.check_unchanged()

    def measure(self, range_bytes: int) -> tuple[int, int]:
        rows, size = self._call(self._sizes)
        return rows, max(min(range_bytes * rows // max(size, 1), LARGEST_RANGE), 1)

    def _open(self, first: int) -> Iterator[Any]:
        """Yield the column of the text in batches, from row `first` on or from a row before it; sets `self._at`."""
        if self._is_parquet():
            parquet = import_module("pyarrow.parquet").ParquetFile(as_stream(self._file), buffer_size=1 << 17)
            self._check_schema(parquet.schema_arrow)
            sizes = [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)]
            group = 0
            while group < len(sizes) - 1 and self._at + sizes[group] <= first:
                self._at += sizes[group]
                group += 1
            groups = list(range(group, len(sizes)))
            found = parquet.iter_batches(BATCH_ROWS, groups, [self._field.name], use_threads=False)
            return (batch.column(self._field.name) for batch in found)
        ipc = self._library.ipc
        stream = as_stream(self._file)
        indexed = self._file.read(0, min(len(ARROW_MAGIC), self._file.size)) == ARROW_MAGIC
        options = ipc.IpcReadOptions(use_threads=False)
        reader = (ipc.open_file if indexed else ipc.open_stream)(stream, options=options)
        self._check_schema(reader.schema)
        index = reader.schema.get_field_index(self._field.name)
        found = map(reader.get_batch, range(reader.num_record_batches)) if indexed else iter(reader)
        return (batch.column(index) for batch in found)

    def _is_parquet(self) -> bool:
        return self._file.path.name.endswith(".parquet")

    def _sizes(self) -> tuple[int, int]:
        """The number of rows, and about the bytes of their text."""
        if self._is_parquet():
            metadata = import_module("pyarrow.parquet").ParquetFile(as_stream(self._file)).metadata
            groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
            columns = [group.column(i) for group in groups for i in range(group.num_columns)]
            sizes = [c.total_uncompressed_size for c in columns if c.path_in_schema == self._field.name]
            return metadata.num_rows, sum(sizes)
        rows = size = 0
        for column in self._open(0):
            rows, size = rows + len(column), size + column.nbytes
        return rows, size

    def _check_schema(self, schema: Any) -> None:
        if schema.get_field_index(self._field.name) < 0:
            raise ValueError(f"{printable(self._file.path)}: {self._field.missing(list(schema.names))}")
        kind = schema.field(self._field.name).type
        types = self._library.types
        inner = kind.value_type if types.is_dictionary(kind) else kind
        if not any(is_text(inner) for is_text in (types.is_string, types.is_large_string, types.is_string_view)):
            name = quoted(self._field.name)
            raise ValueError(f"{printable(self._file.path)}: field {name} must have strings, got {printable(kind)}")

    def _strings(self, rows: Any, before: int) -> Iterator[str]:
        """Yield the text of each row. before: the number of rows that were read before these."""
        for number, value in enumerate(rows, before + 1):
            try:
                text = value.as_py()
                if text is None:
                    raise ValueError(f"field {quoted(self._field.name)} must be a string, got null")
                yield self._field.check(text)
            except UnicodeDecodeError as error:
                problem = f"not UTF-8 at byte {error.start}: {error.reason}"
                raise RowError(printable(self._file.path), number, problem) from None
            except ValueError as error:
                raise RowError(printable(self._file.path), number, str(error)) from None

    def _call(self, function: Any, *arguments: Any) -> Any:
        """Call the library. Its errors become ValueError with the name of the file."""
        try:
            return function(*arguments)
        except (self._library.ArrowException, OSError) as error:
            raise damaged(self._file.path, error) from None


def _pyarrow(file: DataFile) -> Any:
    try:
        return import_module("pyarrow")
    except ImportError:
        raise ValueError(
            f"reading {printable(file.path)} needs the pyarrow library: pip install 'moe-dualpipe[data]'"
        ) from None
