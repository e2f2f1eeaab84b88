"""Free space and write speed of the output folder."""

import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from ...messages import describe
from .facts import Disk

_PIECE = 4 << 20
_SIZE = 64 << 20
_SECONDS = 5.0


def measure_disk(out: Path, mark: bool = False, size: int = _SIZE, seconds: float = _SECONDS) -> Disk:
    """Write up to `size` bytes for up to `seconds` into `out`, or the nearest folder above it that exists.

    The file is removed. mark: leave an empty file behind, for other machines to look for; `remove_mark` removes it.
    """
    folder = out.absolute()
    while not folder.is_dir() and folder != folder.parent:
        if folder.exists():
            return Disk(str(folder), error=f"{folder}: not a folder")
        folder = folder.parent
    name = f".check-cluster-{secrets.token_hex(8)}"
    file, left = folder / f"{name}.part", folder / name
    try:
        speed = _write(file, size, seconds)
        if mark:
            left.touch()
    except OSError as error:
        return Disk(str(folder), _free(folder), error=describe(error))
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    return Disk(str(folder), _free(folder), speed, mark=str(left) if mark else "")


def remove_mark(disk: Disk | None) -> None:
    """Remove the file that `measure_disk` has left behind."""
    if disk is not None and disk.mark:
        with suppress(OSError):
            Path(disk.mark).unlink(missing_ok=True)


def _write(file: Path, size: int, seconds: float) -> float:
    """Bytes per second, synced to the disk."""
    piece = os.urandom(min(_PIECE, size))  # some file systems compress
    written, start = 0, time.monotonic()
    with open(file, "xb", buffering=0) as out:
        while written < size and time.monotonic() - start < seconds:
            written += out.write(piece)
            os.fsync(out.fileno())
    return written / max(time.monotonic() - start, 1e-9)


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
