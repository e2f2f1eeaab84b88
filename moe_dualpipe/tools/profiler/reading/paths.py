"""Which files to read: folders and patterns become lists of traces."""

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
_NUMBER = re.compile(r"(\d+)")


def trace_paths(arguments: Sequence[Path]) -> list[Path]:
    """Replace folders and patterns by their traces, sorted by name. Files keep their places; each appears once.

    A folder without traces stands for the traces in its folders. Raises TraceError if there are none.
    """
    return list(dict.fromkeys(path for argument in arguments for path in _expanded(argument)))


def _expanded(argument: Path) -> list[Path]:
    if argument.is_dir():
        found, where = _traces(argument.iterdir()) or _traces(argument.glob("*/*")), "in this folder"
    elif not argument.exists() and glob.has_magic(str(argument)):
        found, where = _traces(map(Path, glob.glob(str(argument)))), "matches this pattern"
    else:
        return [argument]
    if not found:
        raise TraceError(f"{argument}: no trace {where}: traces are {_KINDS}")
    return found


def _traces(paths: Iterable[Path]) -> list[Path]:
    """The traces among `paths`, sorted by name, in which a number counts as one; hidden files are left out."""
    files = [path for path in paths if path.name.lower().endswith(_SUFFIXES) and path.is_file()]
    visible = [path for path in files if not path.name.startswith(".")]  # macOS: "._rank0.json"
    return sorted(filter(_is_trace, visible), key=lambda path: [*map(_place, _NUMBER.split(str(path)))])


def _place(part: str) -> tuple[int, str]:
    return (int(part[:18]), "") if part.isdecimal() else (0, part)


def _is_trace(path: Path) -> bool:
    """Whether a file is a trace, and no report or file for Perfetto. The reader refuses a file that cannot be read."""
    if path.suffix.lower() == ".sqlite":
        return True
    try:
        start = contents(path, [], _START)
    except OSError:
        return True
    return (len(start) >= _START or _EVENTS.match(start) is not None) and _OWN not in start[:200]
