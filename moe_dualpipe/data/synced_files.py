"""Write files so that they survive a loss of power."""

import os
import uuid
from pathlib import Path


def write_synced(path: Path, data: bytes) -> None:
    """Write a file and sync it. Raises OSError, which names the file."""
    try:
        path.write_bytes(data)
        sync(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write all of `data` into a file, or leave the file as it is. Raises OSError."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_synced(part, data)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
