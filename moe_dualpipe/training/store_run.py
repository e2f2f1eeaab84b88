"""A run whose folder is a URL: where it is, and what its local folder needs before the run starts."""

import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from ..data import stores as storage
from ..runtime.launch import Launch
from . import metrics, restart


def location(text: str) -> Path | storage.Url:
    """What an option names: a folder or a URL. Raises ValueError for a URL without a path."""
    return storage.Url(text) if storage.is_url(text) else Path(text.removeprefix("file://"))


def same(one: Path | storage.Url, other: Path | storage.Url) -> bool:
    if isinstance(one, Path) and isinstance(other, Path):
        return one.resolve() == other.resolve()
    return one == other


def folder_of(run: Path | storage.Url, staging: str | None) -> Path:
    """The folder of a run: itself, or the local one that stands for its URL. Raises ValueError."""
    return run if isinstance(run, Path) else storage.staged_folder(run, staging)


def prepare(folder: Path, launch: Launch, resumed: bool) -> None:
    """Make the local folder of a run on a store what the run's own would be. Does nothing for a local run.

    Files of an earlier run are removed, except after a restart by the launcher. A resumed run continues the metrics
    that are on the store. The first process of a machine does this for the others. Raises StorageError if the store
    cannot be written.
    """
    url = storage.url_of(folder)
    if url is None or launch.local_rank:
        return
    probe = url / f".write-test-{socket.gethostname()}-{os.getpid()}"
    storage.write(probe, b"")
    storage.delete(probe)
    if restart.is_own_folder(folder):
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if resumed and storage.info(url / metrics.FILE):
        partial = folder / f".{metrics.FILE}.part"
        partial.write_bytes(storage.read(url / metrics.FILE))
        with suppress(FileNotFoundError):
            partial.replace(folder / metrics.FILE)
