"""Where pictures and reports are written: checked before any work starts, with errors of one line."""

import os
from collections.abc import Sequence
from pathlib import Path


def check_output(path: Path, suffixes: Sequence[str]) -> None:
    if path.suffix.lower() not in suffixes:
        raise ValueError(f"cannot write {path.name!r}: use one of {', '.join(suffixes)}")
    if path.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: that is a folder")
    if not path.parent.is_dir():
        raise ValueError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")


def make_folder(path: Path) -> None:
    """Create it if it is not there. Raises ValueError where that, or writing into it, is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cannot write to --out {path}: {error.strerror}") from None
    if not os.access(path, os.W_OK):
        raise ValueError(f"cannot write to --out {path}: permission denied")
