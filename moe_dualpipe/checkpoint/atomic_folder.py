"""Create a folder completely or not at all: a checkpoint, or a folder of weights. Ranks write it together.

Its files are written into a hidden folder, which is renamed when all of them are on disk. An object store cannot
rename: there, each rank uploads the files of a folder of its own, and a file by which the folder is recognized comes
last. A file appears on a store at once and complete.
"""

import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ..data import stores
from ..data.files import sync, write_synced
from ..data.one_writer import only_writer
from ..expert_parallel.gather import gather_objects
from ..messages import printable
from ..runtime.shared_errors import Result, errors_on_all_ranks
from .tensor_file import Announce

LAST_FILE = "config.json"
"""The file by which a folder of weights is recognized, so it is written last."""
UPLOAD = stores.Patience(300.0)
"""How long an upload is retried while a store cannot be reached."""


def announce_nothing(_operation: str) -> None:
    pass


def write_folder(
    final: Path, write: Callable[[Path], Result], last: Callable[[list[Result]], Mapping[str, bytes]], *,
    replace: bool = False, remnants: str = "", group: dist.ProcessGroup | None = None,
    announce: Announce = announce_nothing, patience: stores.Patience = UPLOAD,
) -> None:  # fmt: skip
    """Create the folder `final`, which may stand for a URL. Collective over `group`.

    write: called on each rank with the folder in which it writes and syncs its files. last: called on the first rank
    with the results of all ranks; returns the files that it writes then, in order. The last one completes the folder.
    replace: `final` may exist, and nobody else writes it; else it must not, and is locked. remnants: a glob of the
    hidden folders of killed writers. patience: for uploads.

    Raises ValueError if there is something at `final`, and any error of `write`; with several ranks, a ValueError or
    OSError on all of them that says which ranks failed. After an error, nothing of the folder remains on this machine.
    If the process is killed, a hidden folder remains until the next call.
    """
    rank, url = dist.get_rank(group) if dist.is_initialized() else 0, stores.url_of(final)
    local = hidden(final, "unfinished" if url is None else f"rank-{rank}")
    leads, writes = rank == 0, rank == 0 or url is not None

    errors = partial(errors_on_all_ranks, group, partial(announce, ""))
    with ExitStack() as stack:
        with errors():
            if leads and not replace:
                stack.enter_context(only_writer(final, hidden(final, "lock")))
                if is_there(final):
                    raise ValueError(f"{printable(final)} already exists: choose another folder")
            if writes:
                announce("creating its folder")
                stack.callback(remove, local, announce)
                left = final.parent.glob(remnants + (local.suffix if url else "")) if remnants else ()
                for remnant in (local, *left):
                    remove(remnant, announce)
                local.mkdir(parents=True)
        with errors():
            result = write(local)
        results = gather_objects(result, group)
        with errors():
            if url is not None:
                for path in sorted(local.iterdir()):
                    stores.upload_file(path, url / path.name, patience, announce)
        with errors():
            if leads:
                _complete(final, local, last(results), announce, patience)


def _complete(
    final: Path, local: Path, files: Mapping[str, bytes], announce: Announce, patience: stores.Patience
) -> None:
    """Write the last files, and give the folder its name."""
    url = stores.url_of(final)
    for name, data in files.items():
        announce(f"writing {name}")
        if url is None:
            write_synced(local / name, data)
        else:
            stores.write(url / name, data, patience)
    if url is None:
        announce("renaming its folder")
        replaced = hidden(final, "removed")
        sync(local)
        if final.exists():  # a rename cannot replace a folder that is not empty
            final.rename(replaced)
        local.rename(final)
        sync(final.parent)
        remove(replaced, announce)


def hidden(folder: Path, suffix: str) -> Path:
    """A hidden path beside `folder`, such as ".run.unfinished", for what is not complete."""
    return folder.with_name(f".{folder.name}.{suffix}")


def is_there(folder: Path) -> bool:
    """Whether there is something at `folder`; on a store, a complete model."""
    return stores.exists(folder if stores.url_of(folder) is None else folder / LAST_FILE)


def remove(folder: Path, announce: Announce = announce_nothing) -> None:
    """Remove a folder file by file, as far as possible."""
    for path in folder.glob("*"):
        announce(f"removing {printable(path.name)}")
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)
