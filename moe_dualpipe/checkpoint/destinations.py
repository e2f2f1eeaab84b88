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
    return Destination(final, announce) if url is None else StoreDestination(final, url, rank, announce, patience)


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


class Destination:
    """A checkpoint that is being written into a folder that all ranks share.

    folder: where this rank writes its files. leader: whether this is the first rank.
    """

    def __init__(self, final: Path, announce: Announce, suffix: str = "unfinished"):
        self._final, self._announce = final, announce
        self.folder = hidden(final, suffix)

    def create(self, leader: bool) -> None:
        """Make the folder. Raises OSError."""
        if leader:
            self._make_folder(".step-*")

    def send(self, files: Mapping[str, FileChecksum]) -> Mapping[str, FileChecksum]:
        """Pass on the files that this rank has written; returns them. Raises OSError."""
        return files

    def complete(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        """Write the last files, ending with run.json: the checkpoint is complete. Only the leader calls it."""
        checksums = {**manifest.files, **{name: FileChecksum.of(data) for name, data in contents.items()}}
        for name, data in {**contents, RUN_FILE: dataclasses.replace(manifest, files=checksums).encode()}.items():
            self._announce(f"writing {name}")
            self._write(name, data)
        self._publish()

    def discard(self, leader: bool) -> None:
        """Remove what was written of a checkpoint that failed, as far as possible."""
        if leader:
            self._remove(self.folder)

    def remove_old(self, keep: int) -> None:
        """Remove the checkpoints before this one, except the last `keep - 1`; 0 keeps all. Only the leader calls it."""
        for old in too_old(list_checkpoints(self._final.parent), self._final, keep):
            removed = hidden(old, "removed")  # renamed first, so that its name never stands for part of a checkpoint
            with suppress(OSError):
                old.rename(removed)
                self._remove(removed)

    def _make_folder(self, remnants: str) -> None:
        self._announce("creating its folder")
        for remnant in self.folder.parent.glob(remnants):  # from a run that was killed
            self._remove(remnant)
        self.folder.mkdir(parents=True)

    def _write(self, name: str, data: bytes) -> None:
        write_synced(self.folder / name, data)

    def _publish(self) -> None:
        final, removed = self._final, hidden(self._final, "removed")
        self._announce("renaming its folder")
        sync(self.folder)
        if final.exists():  # saved before: a rename cannot replace a folder that is not empty
            final.rename(removed)
        self.folder.rename(final)
        self._remove(removed)
        sync(final.parent)

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


class StoreDestination(Destination):
    """A folder on a store, at `url`. `final`: the local path that stands for it. Each rank has a local folder."""

    def __init__(self, final: Path, url: stores.Url, rank: int, announce: Announce, patience: stores.Patience):
        super().__init__(final, announce, f"rank-{rank}")
        self._url, self._patience = url, patience

    def create(self, leader: bool) -> None:
        self._make_folder(f".step-*{self.folder.suffix}")
        if leader:  # a checkpoint of this step, if it was saved before, is replaced: it is incomplete from now on
            stores.delete(self._url / RUN_FILE, self._patience)

    def send(self, files: Mapping[str, FileChecksum]) -> Mapping[str, FileChecksum]:
        for name in files:
            stores.upload_file(self.folder / name, self._url / name, self._patience, self._announce)
        self._remove(self.folder)
        return files

    def discard(self, leader: bool) -> None:
        """What was uploaded stays: the next save removes it."""
        self._remove(self.folder)

    def remove_old(self, keep: int) -> None:
        with suppress(OSError):
            self._announce("removing old checkpoints")
            complete = list_checkpoints(self._final.parent)
            kept = {path.name for path in complete} - {path.name for path in too_old(complete, self._final, keep)}
            for name in _step_folders(self._url.parent):
                if name not in kept:  # also what is left of one that was never complete
                    self._announce(f"removing {name}")
                    stores.delete_folder(self._url.parent / name, first=RUN_FILE)

    def _write(self, name: str, data: bytes) -> None:
        stores.write(self._url / name, data, self._patience)

    def _publish(self) -> None:
        """A file appears there at once and complete, and run.json was the last."""


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
