"""Create a folder of weights completely or not at all: it gets its name when all of its files are on disk."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .manifest import EXPORT_FILE, ExportManifest, FileChecksum
from .places import hidden, sync, write_synced


@contextmanager
def new_folder(folder: Path, checksums: bool = False) -> Iterator[Path]:
    """Yield a hidden folder for files. Afterwards sync them, and rename it to `folder`.

    checksums: also add checksums.json, which `verify_export` reads.

    After an error, the hidden folder is removed. If the process is killed, it remains until the next call.
    """
    unfinished = hidden(folder, "unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        files = sorted(unfinished.iterdir())
        for path in files:
            sync(path)
        if checksums:
            manifest = ExportManifest({path.name: FileChecksum.of_file(path) for path in files})
            write_synced(unfinished / EXPORT_FILE, manifest.encode())
        sync(unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    sync(folder.parent)
