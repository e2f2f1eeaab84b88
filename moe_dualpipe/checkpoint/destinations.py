"""The checkpoints of a run, in its folder or on an object store, and the other files that are uploaded with them.

A checkpoint on a store is complete, and is found, once it has run.json. So run.json is also what is removed first.
"""

import re
from contextlib import suppress
from pathlib import Path

from ..data import stores
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


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, including broken ones; on a store, only complete ones."""
    url = stores.url_of(folder)
    names = [path.name for path in folder.glob("step-*")] if url is None else _step_folders(url)
    found = [(int(match[1]), folder / name) for name in names if (match := STEP_FOLDER.fullmatch(name))]
    return [path for _, path in sorted(found, reverse=True) if url is None or stores.info(url / path.name / RUN_FILE)]


def _step_folders(url: stores.Url) -> list[str]:
    entries = stores.list_folder(url).values()
    return [entry.name for entry in entries if entry.is_folder and STEP_FOLDER.fullmatch(entry.name)]


def remove_old(newest: Path, keep: int, announce: Announce = announce_nothing) -> None:
    """Remove the checkpoints before `newest`, except the last `keep - 1`, as far as possible; 0 keeps all.

    Later ones belong to another run. On a store, also removes the files of checkpoints that were never completed.
    """
    announce("removing old checkpoints")
    with suppress(OSError):
        complete, url = list_checkpoints(newest.parent), stores.url_of(newest.parent)
        first = complete.index(newest) if newest in complete else len(complete)  # the folder may be removed
        old = complete[first + keep :] if keep else []
        if url is None:
            for path in old:
                removed = hidden(path, "removed")  # renamed first: its name never stands for part of a checkpoint
                with suppress(OSError):
                    path.rename(removed)
                    remove(removed, announce)
            return
        for name in {*_step_folders(url)} - {path.name for path in complete if path not in old}:
            announce(f"removing {name}")
            stores.delete_folder(url / name, first=RUN_FILE)


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
