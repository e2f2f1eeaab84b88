"""The checkpoints of a run, in its folder or on an object store, and the other files that are uploaded with them.

A checkpoint on a store is complete, and is found, once it has run.json. So run.json is also what is removed first.

A run that trains removes its old checkpoints, while another program may read them. So who reads a checkpoint in a local
folder holds it: it is not removed until it is released.
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..data import stores
from ..data.one_writer import try_lock
from ..runtime.launch import Launch
from .atomic_folder import announce_nothing, hidden, remove
from .manifest import RUN_FILE
from .tensor_file import Announce

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
        with open(_held.pop()) as file:
            fcntl.flock(file, fcntl.LOCK_UN)  # a child has the descriptor, too


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
    entries = stores.list_folder(url, patience).values()
    return [entry.name for entry in entries if entry.is_folder and STEP_FOLDER.fullmatch(entry.name)]


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
