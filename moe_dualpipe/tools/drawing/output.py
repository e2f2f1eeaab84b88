"""Check the paths of output files and folders before the work starts."""

import os
from collections.abc import Sequence
from pathlib import Path

from ...messages import printable, quoted


def check_output(path: Path, suffixes: Sequence[str]) -> None:
    """Raise ValueError unless a file with one of the suffixes can be created at `path`."""
    if not path.name.lower().endswith(tuple(suffixes)):
        use = f"one of {', '.join(suffixes)}" if len(suffixes) > 1 else suffixes[0]
        raise ValueError(f"cannot write {quoted(path.name)}: use {use}")
    if path.is_dir():
        raise ValueError(f"cannot write {quoted(str(path))}: it is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {quoted(str(path))}: the folder {quoted(str(path.parent))} does not exist")


def make_folder(path: Path) -> None:
    """Create the folder unless it exists. Raises ValueError if that fails or if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to --out {printable(path)}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"cannot write to --out {printable(path)}: permission denied")
