"""Files with a document in each row: JSON, CSV and TSV, also compressed with gzip or Zstandard, .parquet and .arrow.

Each row gives a text or a chat, or an error that names the file and the row. pyarrow reads tables and Zstandard.

The streaming mode of Hugging Face's `datasets` reads the same formats, but guesses the types of fields:
{"text": "2020-01-01"} becomes a date, and a number among strings, or None for a missing field, is returned like text.
No error names both the file and the row, and JSON takes four times as long.
"""

import csv
import gzip
import io
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from importlib import import_module
from itertools import chain, count
from pathlib import Path
from typing import Any

from ..messages import printable, quoted
from .chats import FIELDS, NO_TEXT, Chat, InvalidRowError, is_chat, parse_chat
from .files import DataFile
from .strict_json import not_utf8, parse

PLAIN = (".json", ".csv", ".tsv")
KINDS = (".jsonl", ".jsonlines", ".ndjson", *PLAIN, ".parquet", ".arrow")
FORMATS = (*KINDS, *(kind + packed for kind in KINDS[:-2] for packed in (".gz", ".zst")))
BATCH_ROWS = 256
LONGEST_LINE = 1 << 28
"""Bytes of a line, or of a list of JSON: a longer one is not a document, and may not fit into memory."""
ARROW_MAGIC = b"ARROW1"  # of .arrow files with an index; Hugging Face's `datasets` writes those without


def row_format(path: Path) -> str:
    """Which of FORMATS a file has, by the end of its name in any case; "" for other files, which are text."""
    return next((ending for ending in FORMATS if path.name.lower().endswith(ending)), "")


def read_rows(file: DataFile, field: str) -> Iterator[str | Chat]:
    """Yield the text in this field of each row, or its chat without such a field; "" for an empty row.

    Raises ValueError, with file and row, counted from 1, for an invalid row, and with the file if it is damaged or has
    changed, or if a library is missing.
    """
    name, number, kind = printable(file.path), 0, row_format(file.path).split(".")[1]
    others = {"json": _open_json, "csv": _open_csv, "tsv": _open_csv, "parquet": _open_table, "arrow": _open_table}
    try:
        rows, end = others.get(kind, _json_lines)(file, field), object()
        for number in count(1):
            if (row := next(rows, end)) is end:
                break
            yield _document(row, field, f"{name}:{number}")
    except (InvalidRowError, csv.Error, UnicodeDecodeError) as error:
        what = f"it is {not_utf8(error)}" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"{name}{f':{number}' if number else ''}: {what}") from None
    except ImportError as error:
        raise ValueError(f"reading {name} needs the {error.name} library: pip install 'moe-dualpipe[data]'") from None
    except Exception as error:  # of many types, of the libraries
        file.check_unchanged()
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        raise ValueError(f"cannot read {name}: {printable(reason)}") from None
    file.check_unchanged()


def _document(row: Any, field: str, place: str) -> str | Chat:
    """The text or the chat in a row, which is a dict, or None if it is empty."""
    if row is None:
        return ""
    if field in FIELDS or (field not in row and is_chat(row)):
        return parse_chat(row, place)
    if field not in row:
        raise _missing(field, row)
    if not isinstance(text := row[field], str):
        raise InvalidRowError(f"field {quoted(field)} must be a string, got {type(text).__name__}")
    if found := NO_TEXT.search(text):
        what = "a zero character" if found[0] == "\0" else f"half of a character, \\u{ord(found[0]):x}"
        raise InvalidRowError(f"field {quoted(field)} contains {what}")
    return text


def _missing(field: str, found: Iterable[str]) -> InvalidRowError:
    names = ", ".join(quoted(key, 50) for key in [*found][:5]) or "none"
    options = "--set batch.data_field=NAME (train.py), --data-field (eval) or --field (data prepare)"
    return InvalidRowError(f"no field {quoted(field)}; its fields are {names}: choose one with {options}")


def _stream(file: DataFile) -> Any:
    stream: Any = file.stream()
    if (packed := row_format(file.path)).endswith("gz"):
        return gzip.GzipFile(fileobj=stream)
    if packed.endswith("zst"):
        return io.BufferedReader(import_module("pyarrow").CompressedInputStream(stream, "zstd"), 1 << 17)
    return stream


def _lines(file: DataFile) -> Iterator[bytes]:
    stream = _stream(file)
    lines = iter(partial(stream.readline, LONGEST_LINE + 1), b"")
    return chain((line.removeprefix(BOM_UTF8) for line in [next(lines, b"")]), lines)


# ---- JSON ----


def _json_lines(file: DataFile, _field: str) -> Iterator[object]:
    return map(_of_line, _lines(file))


def _open_json(file: DataFile, field: str) -> Iterator[object]:
    """The values of a list of objects, of one object, or of lines of them."""
    first = next(filter(bytes.strip, _lines(file)), b"").strip()
    if first.startswith(b"{") and first.endswith(b"}"):
        return _json_lines(file, field)
    whole = _stream(file).read(LONGEST_LINE + 1)
    if len(whole) > LONGEST_LINE:
        hint = "write each object on a line, as in jq -c '.[]' OLD.json > NEW.jsonl"
        raise InvalidRowError(f"a list of JSON has at most {LONGEST_LINE:,} bytes, but this one is longer: {hint}")
    value = _parsed(whole.removeprefix(BOM_UTF8))
    return map(_object, value if isinstance(value, list) else [value])


def _of_line(line: bytes) -> object:
    if len(line) > LONGEST_LINE:
        raise InvalidRowError(f"a line has at most {LONGEST_LINE:,} bytes, but this one is longer")
    return _object(_parsed(line)) if line.strip() else None


def _parsed(content: bytes) -> object:
    """A value of JSON. NaN and halves of characters matter only in the text."""
    with suppress(ValueError):
        return parse(content)
    try:
        return parse(content, allow_nan=True)
    except ValueError as error:
        raise InvalidRowError(printable(error)) from None


def _object(value: object) -> object:
    if not isinstance(value, dict):
        raise InvalidRowError(f"expected an object, got {type(value).__name__}")
    return value


# ---- Tables ----


def _open_csv(file: DataFile, field: str) -> Iterator[object]:
    """The rows, after None for the row of names. A row may have several lines, in quotes."""
    csv.field_size_limit(LONGEST_LINE)
    delimiter = "\t" if ".tsv" in row_format(file.path) else ","
    rows = csv.reader(map(bytes.decode, _lines(file)), delimiter=delimiter, strict=True)
    names = next(rows, [])
    _columns(names, field)

    def cells(row: list[str]) -> dict[str, str] | None:
        if row and len(row) != len(names):
            raise InvalidRowError(f"a row has {len(names)} cells, but this one has {len(row)}")
        return dict(zip(names, row, strict=True)) if row else None

    return chain([None], map(cells, rows))


def _columns(names: list[str], field: str) -> list[str]:
    """The columns to read: that of the field, or those of chats. Raises InvalidRowError if there are none."""
    if (number := names.count(field)) > 1:
        raise InvalidRowError(f"{number} columns are named {quoted(field)}")
    if field not in FIELDS and number:
        return [field]
    if not is_chat(names):
        raise _missing(field, names)
    return [name for name in FIELDS if name in names]


def _open_table(file: DataFile, field: str) -> Iterator[Any]:
    """The rows, read in batches."""
    arrow, stream = import_module("pyarrow"), file.stream()
    if row_format(file.path) == ".parquet":
        table = import_module("pyarrow.parquet").ParquetFile(stream, buffer_size=1 << 17)
        schema = table.schema_arrow
        columns = _columns(schema.names, field)
        batches = partial(table.iter_batches, BATCH_ROWS, columns=columns, use_threads=False)
    else:
        indexed = file.read(0, min(len(ARROW_MAGIC), file.size)) == ARROW_MAGIC
        options = arrow.ipc.IpcReadOptions(use_threads=False)
        table = (arrow.ipc.open_file if indexed else arrow.ipc.open_stream)(stream, options=options)
        schema = table.schema
        columns = _columns(schema.names, field)
        batches = partial(map, table.get_batch, range(table.num_record_batches)) if indexed else partial(iter, table)
    kind = schema.field(columns[0]).type
    inner = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if columns == [field] and inner not in (arrow.string(), arrow.large_string(), arrow.string_view()):
        raise InvalidRowError(f"field {quoted(field)} must have strings, got {printable(kind)}")
    return (row for batch in batches() for row in _rows(batch.select(columns)))


def _rows(batch: Any) -> Iterator[dict[str, Any]]:
    batch.validate(full=True)  # values of a damaged column might lie outside its memory
    for values in zip(*batch.columns, strict=True):
        yield {name: value.as_py() for name, value in zip(batch.schema.names, values, strict=True)}
