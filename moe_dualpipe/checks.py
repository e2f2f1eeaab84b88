"""What several programs check of their options; a mistake is a ValueError of one line."""

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


def choose_device(wanted: str, gpus: int, processes: int) -> str:
    """cpu or cuda. Raises ValueError where `wanted` cannot be had: of auto there is always one."""
    if wanted not in ("cpu", "cuda", "auto"):
        raise ValueError(f"--device must be cpu, cuda or auto: got {wanted!r}")
    if wanted == "cuda" and not gpus:
        raise ValueError("--device cuda, but torch finds no GPU on this machine; use --device cpu")
    if wanted == "cuda" and gpus < processes:
        raise ValueError(
            f"--device cuda needs a GPU for each process, but there are {processes} processes and {gpus} GPUs here: "
            f"start at most {gpus} processes, or use --device cpu"
        )
    if wanted == "auto":
        return "cuda" if gpus >= processes else "cpu"
    return wanted
