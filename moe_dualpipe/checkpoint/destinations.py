"""The checkpoints of a run, in its folder or on an object store, and the other files that are uploaded with them.

A checkpoint on a store is complete, and is found, once it has run.json. So run.json is also what is removed first.

A run that trains removes its old checkpoints, while another program may read them. So who reads a checkpoint in a local
folder holds it: it is not removed until it is released.
"""

import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist

from ..data import stores
from ..data.files import only_writer, sync, try_lock, write_synced
from ..expert_parallel.gather import gather_objects
from ..messages import printable
from ..runtime.launch import Launch
from ..runtime.shared_errors import Result, errors_on_all_ranks
from .manifest import RUN_FILE
from .tensor_file import Announce

# ---- Folders ----
#
# Create a folder completely or not at all: a checkpoint, or a folder of weights. Ranks write it together.
#
# Its files are written into a hidden folder, which is renamed when all of them are on disk. An object store cannot
# rename: there, each rank uploads the files of a folder of its own, and a file by which the folder is recognized comes
# last. A file appears on a store at once and complete.

CONFIG_FILE, ADAPTER_CONFIG_FILE = "config.json", "adapter_config.json"
"""The files by which a folder of weights or of adapters is recognized, so they are written last."""
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
    """Whether there is something at `folder`; on a store, a complete model or adapter."""
    complete = [folder / name for name in (CONFIG_FILE, ADAPTER_CONFIG_FILE)]
    return any(map(stores.exists, [folder] if stores.url_of(folder) is None else complete))


def remove(folder: Path, announce: Announce = announce_nothing) -> None:
    """Remove a folder file by file, as far as possible."""
    for path in folder.glob("*"):
        announce(f"removing {printable(path.name)}")
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


# ---- Checkpoints ----

STEP_FOLDER = re.compile(r"step-(\d+)")


def run_of(checkpoint: str) -> str:
    """The run of a checkpoint, or the run itself. Example: "runs/a/checkpoints/step-000010" -> "runs/a"."""
    parts = checkpoint.rstrip("/").split("/")
    if STEP_FOLDER.fullmatch(parts[-1]):
        parts.pop()
    if parts and parts[-1] == "checkpoints":
        parts.pop()
    return "/".join(parts) or "."


def list_checkpoints(folder: Path, patience: stores.Patience = stores.QUICK) -> list[Path]:
    """The checkpoints in a folder, newest first, including broken ones; on a store, only complete ones."""
    url = stores.url_of(folder)
    names = [path.name for path in folder.glob("step-*")] if url is None else _step_folders(url, patience)
    found = [(int(match[1]), folder / name) for name in names if (match := STEP_FOLDER.fullmatch(name))]
    newest_first = [path for _, path in sorted(found, reverse=True)]
    return [path for path in newest_first if url is None or stores.info(url / path.name / RUN_FILE, patience)]


_held: list[int] = []
"""The lock of the checkpoint that this process holds."""
_TRIES = 100


def hold(checkpoint: Path) -> bool:
    """Keep a checkpoint from being removed, until `release` or until this process holds another one.

    Returns False if it has been removed. One on a store is not kept.
    """
    try:
        lock = try_lock(checkpoint / RUN_FILE, fcntl.LOCK_SH, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:  # on a store, or broken
        return stores.url_of(checkpoint) is not None or checkpoint.exists()
    release()
    _held.extend([] if lock is None else [lock])
    return lock is not None


def release() -> None:
    """Let the checkpoint that this process holds be removed."""
    while _held:
        descriptor = _held.pop()  # perhaps of a folder, in a damaged checkpoint
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child has it, too
        os.close(descriptor)


def hold_each(folder: Path) -> Iterator[Path]:
    """The checkpoints of a run, or in a folder, newest first. Each is held until the next one.

    If some are removed meanwhile, the run has saved others, and is listed again.
    """
    seen = set[Path]()
    for _ in range(_TRIES):
        listed = list_checkpoints(folder / "checkpoints") or list_checkpoints(folder)
        for checkpoint in (one for one in listed if one not in seen):
            if hold(checkpoint):
                seen.add(checkpoint)
                yield checkpoint
        if seen.issuperset(listed):
            return
        time.sleep(0.01)


def hold_newest(path: str | None) -> int | None:
    """The step of the newest checkpoint of the run at `path`, which is held. None if there is none.

    Ranks that read a run agree on it: it may save while they look for its newest one. Raises StorageError.
    """
    if not path or path.startswith("hf://"):  # which has no runs, and would be downloaded
        return None
    newest = next(hold_each(stores.local_path(path)), None)
    return None if newest is None else step_of(newest)


def step_of(checkpoint: Path) -> int:
    """The step in the name of a checkpoint's folder."""
    return int(checkpoint.name.rpartition("-")[2])


def _step_folders(url: stores.Url, patience: stores.Patience) -> list[str]:
    entries = stores.list_folder(url, patience).items()
    return [name for name, entry in entries if entry.is_folder and STEP_FOLDER.fullmatch(name)]


def remove_old(
    newest: Path, keep: int, announce: Announce = announce_nothing, patience: stores.Patience = stores.QUICK
) -> None:
    """Remove the checkpoints before `newest`, except the last `keep - 1`, as far as possible; 0 keeps all.

    Later ones belong to another run. On a store, also removes the files of checkpoints that were never completed.
    """
    announce("removing old checkpoints")
    with suppress(OSError):
        complete, url = list_checkpoints(newest.parent, patience), stores.url_of(newest.parent)
        first = complete.index(newest) if newest in complete else len(complete)  # the folder may be removed
        old = complete[first + keep :] if keep else []
        if url is None:
            for path in old:
                removed = hidden(path, "removed")  # renamed first: its name never stands for part of a checkpoint
                with suppress(OSError):
                    if (lock := try_lock(path / RUN_FILE)) is not None:  # None: somebody reads it
                        with open(lock):
                            path.rename(removed)
                        remove(removed, announce)
            return
        for name in {*_step_folders(url, patience)} - {path.name for path in complete if path not in old}:
            announce(f"removing {name}")
            stores.delete_folder(url / name, first=RUN_FILE, patience=patience)


class RunUploads:
    """Uploads the other files of a run, such as its metrics: those that are new or have changed.

    On each machine, the first process uploads what this machine has.
    """

    def __init__(self, run: Path, patience: stores.Patience):
        self._run, self._patience = run, patience
        self._sent: dict[Path, tuple[int, int]] = {}

    def send(self, announce: Announce = announce_nothing) -> None:
        """Upload new and changed files; nothing for a local run. Raises StorageError."""
        url = stores.url_of(self._run)
        if url is None or Launch.from_environment().local_rank:
            return
        for path in sorted(self._run.rglob("*")):
            name = path.relative_to(self._run)
            if name.parts[0] == "checkpoints" or path.name.startswith(".") or not path.is_file():
                continue
            status = path.stat()
            state = status.st_size, status.st_mtime_ns
            if self._sent.get(path) != state:
                announce(f"uploading {path.name}")
                stores.write(url / name.as_posix(), path.read_bytes(), self._patience)  # training adds records
                self._sent[path] = state
