"""Which files to read: folders and patterns become lists of traces, in the order of ranks."""

import glob
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ..trace import TraceError
from .chrome import WRITTEN_BY, contents

_SUFFIXES = (".json", ".json.gz", ".sqlite")
_KINDS = f"{', '.join(_SUFFIXES)} files"
_START = 1 << 20  # bytes in which the list of events begins
_EVENTS = re.compile(rb'\s*\[|.*?"traceEvents"', re.DOTALL)
_OWN = WRITTEN_BY["writtenBy"].encode()
_RANK = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]*"rank"\s*:\s*(\d{1,9})\b')
_RANK_IN_NAME = re.compile(r"rank\D?(\d+)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")


def trace_paths(arguments: Sequence[Path]) -> list[Path]:
    """Replace folders and patterns by their traces, sorted by rank. Files keep their places; each appears once.

    A folder without traces stands for the traces in its folders. Raises TraceError if there are none.
    """
    return list(dict.fromkeys(path for argument in arguments for path in _expanded(argument)))


def _expanded(argument: Path) -> list[Path]:
    if argument.is_dir():
        folders, where = (folder for folder in sorted(argument.iterdir()) if folder.is_dir()), "in this folder"
        found = _traces(argument.iterdir()) or [path for folder in folders for path in _traces(folder.iterdir())]
    elif not argument.exists() and glob.has_magic(str(argument)):
        found, where = _traces(map(Path, glob.glob(str(argument)))), "matches this pattern"
    else:
        return [argument]
    if not found:
        raise TraceError(f"{argument}: no trace {where}: traces are {_KINDS}")
    return found


def _traces(paths: Iterable[Path]) -> list[Path]:
    """The traces among `paths`, sorted by rank; other JSON files, such as reports, and hidden files are left out."""
    files = [path for path in sorted(paths) if path.name.lower().endswith(_SUFFIXES) and path.is_file()]
    starts = {path: _start(path) for path in files if not path.name.startswith(".")}  # macOS: "._rank0.json"
    return sorted(
        (path for path, start in starts.items() if start is not None),
        key=lambda path: (*_rank(path, starts[path] or b""), path.parent, path.name),
    )


def _start(path: Path) -> bytes | None:
    """The first bytes of a trace, None of another file. Of a file that cannot be read, the reader tells why."""
    if path.suffix.lower() == ".sqlite":
        return b""
    try:
        start = contents(path, [], _START)
    except OSError:
        return b""
    is_trace = len(start) >= _START or _EVENTS.match(start)
    return start if is_trace and _OWN not in start[:200] else None


def _rank(path: Path, start: bytes) -> tuple[bool, int]:
    """The recorded rank, or that in the name, or the last number of the name. Files without any come last."""
    numbers = _NUMBER.findall(path.name)
    if found := _RANK.search(start) or _RANK_IN_NAME.search(path.name):
        return False, int(found[1])
    return (False, int(numbers[-1][:18])) if numbers else (True, 0)
