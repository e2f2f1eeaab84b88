"""Files with a document in each row: .jsonl, also compressed with gzip or Zstandard, .parquet and .arrow.

Each row gives a text, or an error that names the file and the row. pyarrow reads tables and Zstandard.

The streaming mode of Hugging Face's `datasets` reads the same formats, but guesses the types of fields:
{"text": "2020-01-01"} becomes a date, and a number among strings, or None for a missing field, is returned like text.
No error names both the file and the row, and JSON takes four times as long.
"""

import gzip
import io
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from ..messages import printable, quoted
from .files import DataFile
from .strict_json import parse

COMPRESSED, TABLES = (".jsonl.gz", ".jsonl.zst"), (".parquet", ".arrow")
FORMATS = (".jsonl", *COMPRESSED, *TABLES)
BATCH_ROWS = 256
LONGEST_LINE = 1 << 28
"""Bytes of a line of JSON: a longer one is not a document, and may not fit into memory."""
ARROW_MAGIC = b"ARROW1"  # of .arrow files with an index; Hugging Face's `datasets` writes those without


def row_format(path: Path) -> str:
    """Which of FORMATS a file has, by the end of its name; "" for other files, which are text."""
    return next((ending for ending in FORMATS if path.name.endswith(ending)), "")


class _InvalidError(Exception):
    """A row or a table has no valid text. The message says why."""


def read_rows(file: DataFile, field: str) -> Iterator[str]:
    """Yield the text in this field of each row, "" for an empty row.

    Raises ValueError, with file and row, counted from 1, for an invalid row, and with the file if it is damaged or has
    changed, or if a library is missing.
    """
    name, number = printable(file.path), 0
    open_rows = _open_table if row_format(file.path) in TABLES else _lines
    try:
        for row in open_rows(file, field):
            number += 1
            yield _text_of(row, field)
    except _InvalidError as error:
        raise ValueError(f"{name}{f':{number}' if number else ''}: {error}") from None
    except ImportError as error:
        raise ValueError(f"reading {name} needs the {error.name} library: pip install 'moe-dualpipe[data]'") from None
    except Exception as error:  # of many types, of the libraries
        file.check_unchanged()
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(f"cannot read {name}: {printable(reason)}") from None
    file.check_unchanged()


def _text_of(row: Any, field: str) -> str:
    """The text of a line of JSON or of a value of pyarrow; "" for an empty line."""
    text = _of_line(row, field) if isinstance(row, bytes) else row.as_py()
    if not isinstance(text, str):
        raise _InvalidError(f"field {quoted(field)} must be a string, got {type(text).__name__}")
    if "\0" in text:
        raise _InvalidError(f"field {quoted(field)} contains a zero character")
    return text


def _of_line(line: bytes, field: str) -> object:
    if len(line) > LONGEST_LINE:
        raise _InvalidError(f"a line has at most {LONGEST_LINE:,} bytes, but this one is longer")
    if not line.strip():
        return ""
    try:
        value = parse(line)
    except ValueError as error:
        raise _InvalidError(printable(error)) from None
    if not isinstance(value, dict):
        raise _InvalidError(f"expected an object, got {type(value).__name__}")
    if field not in value:
        raise _missing(field, list(value))
    return value[field]


def _missing(field: str, found: list[str]) -> _InvalidError:
    names = ", ".join(quoted(key, 50) for key in found[:5]) or "none"
    options = "--field, or with --set batch.data_field=NAME of train.py"
    return _InvalidError(f"no field {quoted(field)}; its fields are {names}: choose one with {options}")


def _lines(file: DataFile, _: str) -> Iterator[bytes]:
    stream: Any = file.stream()
    if row_format(file.path).endswith("gz"):
        stream = gzip.GzipFile(fileobj=stream)
    elif row_format(file.path).endswith("zst"):
        stream = io.BufferedReader(import_module("pyarrow").CompressedInputStream(stream, "zstd"), 1 << 17)
    return iter(partial(stream.readline, LONGEST_LINE + 1), b"")


def _open_table(file: DataFile, field: str) -> Iterator[Any]:
    """Yield the values of the field, read in batches."""
    arrow, stream = import_module("pyarrow"), file.stream()
    if row_format(file.path) == ".parquet":
        table = import_module("pyarrow.parquet").ParquetFile(stream, buffer_size=1 << 17)
        schema = table.schema_arrow
        batches = partial(table.iter_batches, BATCH_ROWS, columns=[field], use_threads=False)
    else:
        indexed = file.read(0, min(len(ARROW_MAGIC), file.size)) == ARROW_MAGIC
        options = arrow.ipc.IpcReadOptions(use_threads=False)
        table = (arrow.ipc.open_file if indexed else arrow.ipc.open_stream)(stream, options=options)
        schema = table.schema
        batches = partial(map, table.get_batch, range(table.num_record_batches)) if indexed else partial(iter, table)
    if schema.get_field_index(field) < 0:
        raise _missing(field, list(schema.names))
    kind = schema.field(field).type
    inner = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if inner not in (arrow.string(), arrow.large_string(), arrow.string_view()):
        raise _InvalidError(f"field {quoted(field)} must have strings, got {printable(kind)}")
    for batch in batches():
        column = batch.column(field)
        column.validate(full=True)  # values of a damaged column might lie outside its memory
        yield from column
