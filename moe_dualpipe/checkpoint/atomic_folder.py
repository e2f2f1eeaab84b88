"""Create a folder of weights completely or not at all.

Its files are written into a hidden folder, which is renamed when all of them are on disk. A store cannot rename a
folder: there, config.json is uploaded last, and a folder without it holds no model.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from ..data import stores
from ..data.synced_files import sync, write_synced
from ..messages import printable
from ..runtime.shared_errors import errors_on_all_ranks
from .destinations import hidden
from .folder_lock import LOCK_FILE, only_writer
from .manifest import EXPORT_FILE, FileChecksum, encode_checksums
from .save import UPLOAD

LAST_FILE = "config.json"
"""What a folder of weights is recognized by, so it is uploaded last."""


@contextmanager
def new_folder(folder: Path, checksums: bool = False) -> Iterator[Path]:
    """Yield a hidden folder for files, which ranks share. Afterwards sync them, and rename it to `folder`. Collective.

    folder: may stand for a URL. Then each rank has a hidden folder of its own, and uploads its files.
    checksums: also add checksums.json, which `verify_export` reads.

    Raises ValueError on all ranks if there is something at `folder`, and the OSError or ValueError of any rank. After
    an error, the hidden folder is removed. If the process is killed, it remains until the next call.
    """
    rank, url = dist.get_rank() if dist.is_initialized() else 0, stores.url_of(folder)
    unfinished = hidden(folder, "unfinished" if url is None else f"rank-{rank}")
    lock = hidden(folder, "lock") if url is None else folder / LOCK_FILE
    writes = rank == 0 or url is not None
    with ExitStack() as stack:
        with errors_on_all_ranks():
            if rank == 0:
                stack.enter_context(only_writer(folder, lock))
        with errors_on_all_ranks():
            if is_there(folder):
                raise ValueError(f"{printable(folder)} already exists: choose another folder")
            if writes:
                stack.callback(shutil.rmtree, unfinished, ignore_errors=True)
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
        with errors_on_all_ranks():
            yield unfinished
        with errors_on_all_ranks():
            files = sorted(unfinished.iterdir()) if writes else []
            for path in files:
                sync(path)
            if checksums and writes:
                content = encode_checksums({path.name: FileChecksum.of_file(path) for path in files})
                write_synced(unfinished / EXPORT_FILE, content)
            if url is not None:
                _upload(unfinished, url)
        with errors_on_all_ranks():
            if url is not None:
                _upload(unfinished, url, last=True)
            elif writes:
                sync(unfinished)
                unfinished.rename(folder)
                sync(folder.parent)


def is_there(folder: Path) -> bool:
    """Whether there is something at `folder`; on a store, a model that is complete."""
    return stores.exists(folder if stores.url_of(folder) is None else folder / LAST_FILE)


def _upload(local: Path, url: stores.Url, last: bool = False) -> None:
    """Upload the files in `local`: config.json if `last`, or else the others."""
    for path in sorted(local.iterdir()):
        if (path.name == LAST_FILE) == last:
            stores.upload_file(path, url / path.name, UPLOAD)
