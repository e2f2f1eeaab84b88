"""Files with a document in each row: .jsonl, also compressed, and .parquet and .arrow.

Several processes read different ranges of one file. A row belongs to the range in which it starts, so each row is read
once, whatever the ranges are. Places are bytes of the uncompressed lines, or numbers of rows in tables. A file that is
not compressed is read from any place; the others are read from their start, and a process that reads several ranges in
order reads them once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from ..messages import printable, quoted

JSONL = ".jsonl"
COMPRESSED, TABLES = (".jsonl.gz", ".jsonl.zst"), (".parquet", ".arrow")
FORMATS = (JSONL, *COMPRESSED, *TABLES)


def row_format(path: Path) -> str:
    """Which of FORMATS a file has, by the end of its name; "" for other files, which are text."""
    return next((ending for ending in FORMATS if path.name.endswith(ending)), "")


class RowError(ValueError):
    """An invalid row, named by file and number. Numbers count from 1, from where the reader started."""

    def __init__(self, path: str, number: int, problem: str):
        super().__init__(path, number, problem)

    def __str__(self) -> str:
        path, number, problem = self.args
        return f"{path}:{number}: {problem}"

    def moved(self, rows: int) -> "RowError":
        """The same error, for a reader that started after `rows` rows."""
        path, number, problem = self.args
        return RowError(path, number + rows, problem)


@dataclass(frozen=True, slots=True)
class TextField:
    """The field of each row that has the text. option: which one chooses it, in messages."""

    name: str = "text"
    option: str = "--set batch.data_field=NAME"

    def missing(self, found: list[str]) -> ValueError:
        """The error for a row or table with only the fields `found`."""
        names = ", ".join(quoted(key, 50) for key in found[:5]) or "none"
        return ValueError(f"no field {quoted(self.name)}; its fields are {names}: choose one with {self.option}")

    def check(self, text: str) -> str:
        """Return `text`, or raise ValueError if it cannot be training text."""
        if "\0" in text:
            raise ValueError(f"field {quoted(self.name)} contains a zero character")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"field {quoted(self.name)} has an unpaired surrogate at character {error.start}"
            ) from None
        return text


TEXT = TextField()


class RowReader(Protocol):
    """Reads the rows of one file."""

    def texts(self, first: int, stop: int | None) -> Iterator[str]:
        """Yield the text of each row that starts in `first` to `stop` (None: the end); "" for an empty row.

        Raises RowError for an invalid row, and ValueError for a file that is damaged or has changed.
        """
        ...

    def measure(self, range_bytes: int) -> tuple[int, int]:
        """The size of the file, and that of a range with about `range_bytes` of text, in the unit of `texts`."""
        ...


def damaged(path: Path, error: object) -> ValueError:
    """The error for a file that a library cannot read, with the first line of what the library says."""
    reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
    return ValueError(f"cannot read {printable(path)}: {printable(reason)}")
