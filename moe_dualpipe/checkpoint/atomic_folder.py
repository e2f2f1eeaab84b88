"""Create a folder of weights completely or not at all: it gets its name when all of its files are on disk."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..data import stores
from ..data.synced_files import sync, write_synced
from ..messages import printable
from .destinations import hidden
from .folder_lock import LOCK_FILE, only_writer
from .manifest import EXPORT_FILE, ExportManifest, FileChecksum
from .save import UPLOAD

LAST_FILE = "config.json"
"""What a folder of weights is recognized by, so it is uploaded last."""


@contextmanager
def new_folder(folder: Path, checksums: bool = False) -> Iterator[Path]:
    """Yield a hidden folder for files. Afterwards sync them, and rename it to `folder`.

    checksums: also add checksums.json, which `verify_export` reads.

    folder: may stand for a URL. Then the files are uploaded, config.json as the last: without it, the folder holds no
    model. After an error, the hidden folder is removed. If the process is killed, it remains until the next call.
    """
    unfinished = hidden(folder, "unfinished")
    with only_exporter(folder):
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            yield unfinished
            _publish(unfinished, folder, checksums)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def only_exporter(folder: Path) -> Iterator[None]:
    """Hold the lock of the new folder `folder`. Raises ValueError if another process writes it, or has written it."""
    lock = hidden(folder, "lock") if stores.url_of(folder) is None else folder / LOCK_FILE
    with only_writer(folder, lock):
        check_new(folder)
        yield


def _publish(unfinished: Path, folder: Path, checksums: bool) -> None:
    files = sorted(unfinished.iterdir())
    for path in files:
        sync(path)
    if checksums:
        manifest = ExportManifest({path.name: FileChecksum.of_file(path) for path in files})
        write_synced(unfinished / EXPORT_FILE, manifest.encode())
    if stores.url_of(folder) is not None:
        upload_files(unfinished, folder)
        upload_files(unfinished, folder, last=True)
        return
    sync(unfinished)
    unfinished.rename(folder)
    sync(folder.parent)


def is_there(folder: Path) -> bool:
    """Whether there is something at `folder`; on a store, a model that is complete."""
    return stores.exists(folder if stores.url_of(folder) is None else folder / LAST_FILE)


def check_new(folder: Path) -> None:
    """Raise ValueError if there is something at `folder`."""
    if is_there(folder):
        raise ValueError(f"{printable(folder)} already exists: choose another folder")


def upload_files(local: Path, folder: Path, last: bool = False) -> None:
    """Upload the files in `local` to the URL that `folder` stands for: config.json if `last`, or else the others."""
    url = stores.url_of(folder)
    assert url is not None
    for path in sorted(local.iterdir()):
        if (path.name == LAST_FILE) == last:
            stores.upload_file(path, url / path.name, UPLOAD)
