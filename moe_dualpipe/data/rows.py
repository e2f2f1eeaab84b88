"""Files with a document in each row: .jsonl, also compressed with gzip or Zstandard, .parquet and .arrow.

Each row gives a text, or an error that names the file and the row. pyarrow reads tables and Zstandard.

The streaming mode of Hugging Face's `datasets` reads the same formats, but guesses the types of fields:
{"text": "2020-01-01"} becomes a date, and a number among strings, or None for a missing field, is returned like text.
No error names both the file and the row, and JSON takes four times as long.
"""

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ..messages import printable, quoted
from .files import DataFile

COMPRESSED, TABLES = (".jsonl.gz", ".jsonl.zst"), (".parquet", ".arrow")
FORMATS = (".jsonl", *COMPRESSED, *TABLES)
BATCH_ROWS = 256
LONGEST_LINE = 1 << 28
"""Bytes of a line of JSON: a longer one is not a document, and may not fit into memory."""
ARROW_MAGIC = b"ARROW1"  # of .arrow files with an index; Hugging Face's `datasets` writes those without


def row_format(path: Path) -> str:
    """Which of FORMATS a file has, by the end of its name; "" for other files, which are text."""
    return next((ending for ending in FORMATS if path.name.endswith(ending)), "")


@dataclass(frozen=True, slots=True)
class TextField:
    """The field of each row that has the text. option: which one chooses it, in messages."""

    name: str = "text"
    option: str = "--set batch.data_field=NAME"

    def missing(self, found: list[str]) -> ValueError:
        """The error for a row or table with only the fields `found`."""
        names = ", ".join(quoted(key, 50) for key in found[:5]) or "none"
        return ValueError(f"no field {quoted(self.name)}; its fields are {names}: choose one with {self.option}")

    def text_of(self, row: Any) -> str:
        """The text of a line of JSON or of a value of pyarrow; "" for an empty line. Raises ValueError."""
        try:
            text = self._of_line(row) if isinstance(row, bytes) else row.as_py()
        except UnicodeDecodeError as error:
            raise ValueError(f"not UTF-8 at byte {error.start}: {error.reason}") from None
        if not isinstance(text, str):
            raise ValueError(f"field {quoted(self.name)} must be a string, got {type(text).__name__}")
        if "\0" in text:
            raise ValueError(f"field {quoted(self.name)} contains a zero character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = f"at character {error.start}"
            raise ValueError(f"field {quoted(self.name)} has an unpaired surrogate {where}") from None
        return text

    def _of_line(self, line: bytes) -> object:
        if len(line) > LONGEST_LINE:
            raise ValueError(f"a line has at most {LONGEST_LINE:,} bytes, but this one is longer")
        if not line.strip():
            return ""
        text = line.rstrip(b"\n").decode()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not JSON: {printable(error)}") from None
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, got {type(value).__name__}")
        if self.name not in value:
            raise self.missing(list(value))
        return value[self.name]


def read_rows(file: DataFile, field: TextField) -> Iterator[str]:
    """Yield the text of each row, "" for an empty one.

    Raises ValueError, with file and row, counted from 1, for an invalid row, and with the file if it is damaged or has
    changed, or if a library is missing.
    """
    name, number = printable(file.path), 0
    rows = _call(file, _open_table if row_format(file.path) in TABLES else _lines, file, field)
    while (row := _call(file, next, rows, None)) is not None:
        number += 1
        try:
            text = field.text_of(row)
        except ValueError as error:
            raise ValueError(f"{name}:{number}: {error}") from None
        yield text
    file.check_unchanged()


class _TableError(Exception):
    """The table has no text in the field."""


def _call(file: DataFile, function: Any, *arguments: Any) -> Any:
    """Call a library that reads the file: its errors, of many types, become ValueError with the name of the file."""
    name = printable(file.path)
    try:
        return function(*arguments)
    except ImportError as error:
        raise ValueError(f"reading {name} needs the {error.name} library: pip install 'moe-dualpipe[data]'") from None
    except _TableError as error:
        raise ValueError(f"{name}: {error}") from None
    except Exception as error:
        file.check_unchanged()
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(f"cannot read {name}: {printable(reason)}") from None


def _lines(file: DataFile, _: TextField) -> Iterator[bytes]:
    stream: Any = file.stream()
    if row_format(file.path).endswith("gz"):
        stream = gzip.GzipFile(fileobj=stream)
    elif row_format(file.path).endswith("zst"):
        stream = io.BufferedReader(import_module("pyarrow").CompressedInputStream(stream, "zstd"), 1 << 17)
    return iter(partial(stream.readline, LONGEST_LINE + 1), b"")


def _open_table(file: DataFile, field: TextField) -> Iterator[Any]:
    """Yield the values of the field, read in batches."""
    arrow, stream = import_module("pyarrow"), file.stream()
    if row_format(file.path) == ".parquet":
        table = import_module("pyarrow.parquet").ParquetFile(stream, buffer_size=1 << 17)
        schema = table.schema_arrow
        batches = partial(table.iter_batches, BATCH_ROWS, columns=[field.name], use_threads=False)
    else:
        indexed = file.read(0, min(len(ARROW_MAGIC), file.size)) == ARROW_MAGIC
        options = arrow.ipc.IpcReadOptions(use_threads=False)
        table = (arrow.ipc.open_file if indexed else arrow.ipc.open_stream)(stream, options=options)
        schema = table.schema
        batches = partial(map, table.get_batch, range(table.num_record_batches)) if indexed else partial(iter, table)
    if schema.get_field_index(field.name) < 0:
        raise _TableError(field.missing(list(schema.names)))
    kind = schema.field(field.name).type
    inner = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if inner not in (arrow.string(), arrow.large_string(), arrow.string_view()):
        raise _TableError(f"field {quoted(field.name)} must have strings, got {printable(kind)}")
    return (value for batch in batches() for value in _valid(batch.column(field.name)))


def _valid(column: Any) -> Any:
    """Raises pyarrow's error for a damaged column, whose values might lie outside its memory."""
    column.validate(full=True)
    return column
