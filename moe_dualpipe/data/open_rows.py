"""Opens a file of rows with the reader of its format."""

from .files import DataFile
from .jsonl import JsonLines
from .rows import TABLES, RowReader, TextField, row_format
from .tables import Table


def open_rows(file: DataFile, field: TextField) -> RowReader:
    """Read a file of one of FORMATS. Raises ValueError if it is damaged, or if a library is missing."""
    if (ending := row_format(file.path)) in TABLES:
        return Table(file, field)
    return JsonLines(file, ending, field)
