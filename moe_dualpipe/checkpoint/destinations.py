"""Where a checkpoint is written: a folder, which is renamed when it is complete, or an object store.

A store cannot rename. So each rank writes its files into a local folder and uploads them. Afterwards the first rank
uploads the other files, and run.json as the last. A checkpoint on a store is complete, and is found, once it has
run.json: a file appears there at once and complete. run.json is also what is removed first.
"""

import dataclasses
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from ..data import stores
from ..data.synced_files import sync, write_synced
from ..messages import printable
from ..runtime.launch import Launch
from .manifest import RUN_FILE, FileChecksum, Manifest

STEP_FOLDER = re.compile(r"step-(\d+)")
Announce = Callable[[str], object]


def destination_of(final: Path, rank: int, announce: Announce, patience: stores.Patience) -> "Destination":
    """The destination of the checkpoint `final`. rank: of this process. patience: for uploads."""
    url = stores.url_of(final)
    return FolderDestination(final, announce) if url is None else StoreDestination(final, url, rank, announce, patience)


def with_contents(manifest: Manifest, contents: Mapping[str, bytes]) -> Manifest:
    """The manifest that also lists these files."""
    checksums = {**manifest.files, **{name: FileChecksum.of(data) for name, data in contents.items()}}
    return dataclasses.replace(manifest, files=checksums)


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
    if url is None:
        paths = [*folder.glob("step-*")]
    else:
        names = [name for name in _step_folders(url) if stores.info(url / name / RUN_FILE)]
        paths = [folder / name for name in names]
    found = [(int(match[1]), path) for path in paths if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def too_old(checkpoints: list[Path], newest: Path, keep: int) -> list[Path]:
    """Those before `newest`, except the last `keep - 1`. Later ones belong to another run. keep: 0 keeps all."""
    first = checkpoints.index(newest) if newest in checkpoints else len(checkpoints)  # the folder may be removed
    return checkpoints[first + keep :] if keep else []


def _step_folders(url: stores.Url) -> list[str]:
    entries = stores.list_folder(url).values()
    return [entry.name for entry in entries if entry.is_folder and STEP_FOLDER.fullmatch(entry.name)]


# ---- A folder: only the leader makes and renames it ----


class FolderDestination:
    """A checkpoint that is being written into a folder that all ranks share. folder: where this rank writes its files.

    All methods but `discard` and `remove_old` raise OSError. Only the leader calls `complete` and `remove_old`.
    """

    def __init__(self, final: Path, announce: Announce):
        self._final, self._announce = final, announce
        self.folder = hidden(final, "unfinished")

    def create(self, leader: bool) -> None:
        """Make the folder."""
        if not leader:
            return
        self._announce("creating its folder")
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        for remnant in self.folder.parent.glob(".step-*"):  # from a run that was killed
            self._remove(remnant)
        self.folder.mkdir()

    def send(self, files: Mapping[str, FileChecksum]) -> Mapping[str, FileChecksum]:
        """Pass on the files that this rank has written; returns them."""
        return files

    def complete(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        """Write the last files, ending with run.json. Rename the folder when everything is on disk."""
        final, removed = self._final, hidden(self._final, "removed")
        for name, data in contents.items():
            self._announce(f"writing {name}")
            write_synced(self.folder / name, data)
        self._announce(f"writing {RUN_FILE}")
        write_synced(self.folder / RUN_FILE, with_contents(manifest, contents).encode())
        self._announce("renaming its folder")
        sync(self.folder)
        if final.exists():  # saved before: a rename cannot replace a folder that is not empty
            final.rename(removed)
        self.folder.rename(final)
        self._remove(removed)
        sync(final.parent)

    def discard(self, leader: bool) -> None:
        """Remove what was written of a checkpoint that failed, as far as possible."""
        if leader:
            self._remove(self.folder)

    def remove_old(self, keep: int) -> None:
        """Remove the checkpoints before this one, except the last `keep - 1`; 0 keeps all."""
        for old in too_old(list_checkpoints(self._final.parent), self._final, keep):
            removed = hidden(old, "removed")  # renamed first, so that its name never stands for part of a checkpoint
            with suppress(OSError):
                old.rename(removed)
                self._remove(removed)

    def _remove(self, folder: Path) -> None:
        """Remove a folder file by file, as far as possible."""
        for path in folder.glob("*"):
            self._announce(f"removing {printable(path.name)}")
            with suppress(OSError):
                path.unlink()
        shutil.rmtree(folder, ignore_errors=True)


def hidden(folder: Path, suffix: str) -> Path:
    """A name beside `folder` for something that is not, or no longer, complete."""
    return folder.with_name(f".{folder.name}.{suffix}")


# ---- A store: each rank has a local folder of its own ----


class StoreDestination:
    """A folder on a store, at `url`. `final`: the local path that stands for it."""

    def __init__(self, final: Path, url: stores.Url, rank: int, announce: Announce, patience: stores.Patience):
        self._final, self._url, self._announce, self._patience = final, url, announce, patience
        self._suffix = f"rank-{rank}"
        self.folder = hidden(final, self._suffix)

    def create(self, leader: bool) -> None:
        self._announce("creating its folder")
        for remnant in self.folder.parent.glob(f".step-*.{self._suffix}"):  # from a run that was killed
            shutil.rmtree(remnant, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if leader:  # a checkpoint of this step, if it was saved before, is replaced: it is incomplete from now on
            stores.delete(self._url / RUN_FILE, self._patience)

    def send(self, files: Mapping[str, FileChecksum]) -> Mapping[str, FileChecksum]:
        for name in files:
            stores.upload_file(self.folder / name, self._url / name, self._patience, self._announce)
        shutil.rmtree(self.folder, ignore_errors=True)
        return files

    def complete(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        for name, data in contents.items():
            self._announce(f"uploading {name}")
            stores.write(self._url / name, data, self._patience)
        self._announce(f"uploading {RUN_FILE}")
        stores.write(self._url / RUN_FILE, with_contents(manifest, contents).encode(), self._patience)

    def discard(self, leader: bool) -> None:
        """What was uploaded stays: it is not sent again if the run is resumed, and the next save removes it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def remove_old(self, keep: int) -> None:
        with suppress(OSError):
            self._announce("removing old checkpoints")
            parent = self._url.parent
            complete = list_checkpoints(self._final.parent)
            names = {path.name for path in complete}
            remnants = [name for name in _step_folders(parent) if name not in names]
            for name in [*(path.name for path in too_old(complete, self._final, keep)), *remnants]:
                self._announce(f"removing {name}")
                stores.delete_folder(parent / name, first=RUN_FILE)
            stores.abort_uploads(parent)


Destination = FolderDestination | StoreDestination


class RunUploads:
    """Uploads the other files of a run, such as its metrics: those that are new or have changed.

    On each machine, the first process uploads what this machine has.
    """

    def __init__(self, run: Path, patience: stores.Patience):
        self._run, self._patience = run, patience
        self._sent: dict[Path, tuple[int, int]] = {}

    def send(self, announce: Announce = lambda _: None) -> None:
        """Raises StorageError. Does nothing for a local run."""
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
                self._send(path, url / name.as_posix(), announce)
                self._sent[path] = state

    def _send(self, path: Path, url: stores.Url, announce: Announce) -> None:
        copy = hidden(path, "copy")  # training goes on, and adds records
        try:
            shutil.copyfile(path, copy)
            stores.upload_file(copy, url, self._patience, announce)
        finally:
            copy.unlink(missing_ok=True)
