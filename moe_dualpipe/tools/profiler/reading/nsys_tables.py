"""The tables of an export of Nsight Systems, where any table or column can be missing."""

import sqlite3
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

_MARK = b"SQLite format 3\0"


def is_sqlite(path: Path) -> bool:
    """Whether a file begins like a SQLite file. Raises OSError."""
    with path.open("rb") as file:
        return file.read(len(_MARK)) == _MARK


class Tables:
    """Rows of tables, which are never changed. Raises sqlite3.Error.

    If the `long` tables have more than `most_rows` together, each is read up to its share, in the order of time.
    """

    def __init__(self, path: Path, long: tuple[str, ...], most_rows: int):
        # immutable: without locks and side files, so that a file in a folder without write access can be read
        self._file = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        self._file.text_factory = lambda text: text.decode("utf-8", "replace")
        self._tables = {name for (name,) in self._file.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        self.columns = cache(self._columns)
        self._long = {table for table in long if {"start", "end"} <= self.columns(table)}
        rows = sum(map(self._count, self._long))
        self._share = min(1.0, most_rows / max(rows, 1))

    @property
    def truncated(self) -> bool:
        """Whether rows are left out."""
        return self._share < 1

    def rows(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield these columns of a table, None where a column is missing; nothing if the table is missing."""
        if not self.columns(table):
            return iter(())
        query = f"SELECT {self._select(table, columns)} FROM {_quoted(table)}"
        if self.truncated and table in self._long:
            query += f" ORDER BY start LIMIT {int(self._count(table) * self._share) + 1}"
        return self._file.execute(query)

    def distinct(self, table: str, *columns: str) -> Iterator[tuple[Any, ...]]:
        """Yield the different values of these columns."""
        return self._file.execute(f"SELECT DISTINCT {self._select(table, columns)} FROM {_quoted(table)}")

    def names(self) -> dict[int, str]:
        """The texts of kernels, calls and ranges, by id."""
        users = [
            (table, column)
            for table in self._long
            for column in ("demangledName", "shortName", "mangledName", "nameId", "textId")
            if column in self.columns(table)
        ]
        used = " UNION ".join(f"SELECT {_quoted(column)} FROM {_quoted(table)}" for table, column in users)
        if not used:
            return {}
        texts = "SELECT id, CAST(value AS TEXT) FROM StringIds WHERE value IS NOT NULL"
        return dict(self._file.execute(f"{texts} AND id IN ({used})"))

    def close(self) -> None:
        self._file.close()

    def _columns(self, table: str) -> frozenset[str]:
        if table not in self._tables:
            return frozenset()
        return frozenset(column for _, column, *_ in self._file.execute(f"PRAGMA table_info({_quoted(table)})"))

    def _count(self, table: str) -> int:
        return self._file.execute(f"SELECT count(*) FROM {_quoted(table)}").fetchone()[0]

    def _select(self, table: str, columns: tuple[str, ...]) -> str:
        return ", ".join(_quoted(column) if column in self.columns(table) else "NULL" for column in columns)


def process_id(identifier: object) -> int:
    """The process in a global id of a process or thread; 0 if unknown."""
    return identifier >> 24 & 0xFFFFFF if isinstance(identifier, int) else 0


def thread_of(identifier: object) -> tuple[str, str]:
    """Process and thread in a global id of a thread."""
    thread = identifier & 0xFFFFFF if isinstance(identifier, int) else 0
    return sys.intern(str(process_id(identifier))), sys.intern(str(thread))


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
