"""Which files to read: folders and patterns become lists of traces, in the order of ranks."""

import glob
import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from ..trace import TraceError
from .chrome import LONGEST_HEADER
from .pieces import text_pieces

_SUFFIXES = (".json", ".json.gz", ".sqlite")
_KINDS = f"{', '.join(_SUFFIXES)} files"
_RANK = re.compile(r'"distributedInfo"\s*:\s*\{[^{}\[\]]*"rank"\s*:\s*(\d{1,9})\b')
_RANK_IN_NAME = re.compile(r"rank\D?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


def trace_paths(arguments: Sequence[Path]) -> list[Path]:
    """Replace folders and patterns by their traces, sorted by rank. Files keep their places; each appears once.

    A folder without traces stands for the traces in its folders. Raises TraceError if there are none.
    """
    return list(dict.fromkeys(path for argument in arguments for path in _expanded(argument)))


def _expanded(argument: Path) -> list[Path]:
    if argument.is_dir():
        found = _traces(argument.iterdir())
        found = found or [path for folder in sorted(argument.iterdir()) if folder.is_dir()
                          for path in _traces(folder.iterdir())]  # fmt: skip
        if not found:
            raise TraceError(f"{argument}: no trace in this folder: traces are {_KINDS}")
        return found
    if not argument.exists() and glob.has_magic(str(argument)):
        found = _traces(map(Path, glob.glob(str(argument))))
        if not found:
            raise TraceError(f"{argument}: no trace matches this pattern: traces are {_KINDS}")
        return found
    return [argument]


def _traces(paths: Iterator[Path]) -> list[Path]:
    """The traces among `paths`, sorted by rank; other JSON files, such as reports, and hidden files are left out."""
    files = [path for path in sorted(paths) if path.name.lower().endswith(_SUFFIXES) and path.is_file()]
    files = [path for path in files if not path.name.startswith(".")]  # macOS adds "._rank0.json" to archives
    starts = {path: _start(path) for path in files}
    traces = [path for path, start in starts.items() if start is None or _is_trace(start)]
    return sorted(traces, key=lambda path: (*_rank(path, starts[path]), path.parent, path.name))


def _start(path: Path) -> str | None:
    """The text before the events; None if there is none, or if it cannot be read, which is told when the trace is."""
    if path.suffix.lower() == ".sqlite":
        return None
    text = ""
    try:
        with closing(text_pieces(path, [])) as pieces:
            for piece in pieces:
                text += piece
                if '"traceEvents"' in text or text.lstrip().startswith("[") or len(text) > LONGEST_HEADER:
                    break
    except (OSError, zlib.error):
        return None
    return text


def _is_trace(start: str) -> bool:
    return '"traceEvents"' in start or start.lstrip().startswith("[") or len(start) > LONGEST_HEADER


def _rank(path: Path, start: str | None) -> tuple[bool, int]:
    """The recorded rank, or that in the name, or the last number of the name. Files without any come last."""
    if start is not None and (recorded := _RANK.search(start)):
        return False, int(recorded[1])
    if named := _RANK_IN_NAME.search(path.name):
        return False, int(named[1])
    numbers = _NUMBER.findall(path.name)
    return (False, int(numbers[-1][:18])) if numbers else (True, 0)
