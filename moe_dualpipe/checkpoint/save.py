"""Write checkpoints completely or not at all, while training continues.

Training waits only for a copy of the state in host memory. A thread writes the copy and talks to the threads of other
ranks over a separate gloo group, so its collectives never mix with those of training. The folder gets its final name
after all bytes are on disk. If one rank cannot write (disk full), the save fails on all ranks, and training goes on.
No timeout ends a slow save. Instead, each operation on the disk is announced, so that the caller can detect one that
hangs. The cost is host memory for one copy of the rank's weights and optimizer state.
"""

import dataclasses
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from concurrent import futures
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from ..messages import printable
from ..models import ModelConfig
from ..runtime.groups import create_group
from ..runtime.shared_errors import Result, gather_objects
from .files import Announce, ChecksumFiles, Writer
from .manifest import RUN_FILE, TENSORS_FILE, FileChecksum, Manifest

STEP_FOLDER = re.compile(r"step-(\d+)")
_WAIT_SECONDS = 24 * 3600.0
"""Seconds that a rank waits for the disks of others, however slow they are."""


def _announce_nothing(_operation: str) -> None:
    pass


class SaveError(OSError):
    """A checkpoint could not be written. Raised on all ranks; the message says which ranks failed and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class SaveResult:
    """The result of a save. `error` is empty, or says which ranks failed and why."""

    step: int
    path: Path
    error: str = ""


class Saver:
    """Writes the checkpoints of a run in the background, one at a time. All methods but `poll` are collective."""

    def __init__(
        self, run: Path, model: ModelConfig, keep: int, background: bool = True, announce: Announce = _announce_nothing
    ):  # fmt: skip
        """background: if False, `start` waits for the save. announce: see `Announce`; called by a thread."""
        self.run, self.model, self.keep, self.background, self.announce = run, model, keep, background, announce
        group = create_group(backend="gloo", timeout=_WAIT_SECONDS)
        assert group is not None
        self._group = group
        self._threads = futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: futures.Future[SaveResult] | None = None

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def start(self, step: int, state: Mapping[str, Tensor], extra: Mapping[str, bytes] | None = None) -> None:
        """Start saving a copy of `state` as the checkpoint of `step`. First call `wait` for the last save."""
        assert self._pending is None
        if self.background:
            state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        self._pending = self._threads.submit(self._write, step, state, extra or {})
        if not self.background:
            futures.wait([self._pending])

    def wait(self) -> SaveResult | None:
        """Wait for the last save and return its result, or None if that was already returned."""
        pending, self._pending = self._pending, None
        return None if pending is None else pending.result()

    def poll(self) -> SaveResult | None:
        """Like `wait`, but returns None while a save is running."""
        return None if self.busy else self.wait()

    def close(self) -> None:
        """Finish the last save. Never raises, because another error is often being handled."""
        with suppress(Exception):
            saved = self.wait()
            if saved and saved.error and dist.get_rank() == 0:
                sys.stderr.write(f"{printable(saved.path)} could not be written: {printable(saved.error, 1000)}\n")
        self._threads.shutdown()

    def _write(self, step: int, state: Mapping[str, Tensor], extra: Mapping[str, bytes]) -> SaveResult:
        def announce(operation: str) -> None:
            self.announce(operation and f"step {step}: {operation}")

        try:
            path = save_checkpoint(self.run, step, state, self.model, extra, self.keep, self._group, announce)
            return SaveResult(step, path)
        except SaveError as error:
            return SaveResult(step, checkpoint_folder(self.run, step), str(error))


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, including broken ones."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := STEP_FOLDER.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def save_checkpoint(
    run: Path, step: int, state: Mapping[str, Tensor], model: ModelConfig, extra: Mapping[str, bytes] | None = None,
    keep: int = 0, group: dist.ProcessGroup | None = None, announce: Announce = _announce_nothing,
) -> Path:  # fmt: skip
    """Save `state` (global name -> tensor) as the checkpoint after `step` updates. Collective over `group`.

    extra: more files, name -> contents, which rank 0 writes. keep: number of checkpoints to keep, counting this one;
    older ones are removed; 0 keeps all. Raises SaveError on all ranks if any rank could not write; then the earlier
    checkpoints are unchanged and nothing is left of this one.
    """
    final = checkpoint_folder(run, step)
    unfinished = hidden(final, "unfinished")
    leader, files = dist.get_rank(group) == 0, ChecksumFiles(announce)
    try:
        _run_on_all(lambda: _make_folder(unfinished, announce) if leader else None, group, announce)
        writer = Writer(unfinished, files)
        dcp.save(dict(state), storage_writer=writer, process_group=group)
        checksums: dict[str, FileChecksum] = {}
        for of_rank in _run_on_all(lambda: files.checksums, group, announce):
            checksums |= of_rank
        manifest = Manifest(step, dataclasses.asdict(model), checksums)
        more = {**(extra or {}), TENSORS_FILE: writer.tensors}
        _run_on_all(lambda: _complete(final, manifest, more, announce) if leader else None, group, announce)
    except (dcp.CheckpointException, SaveError) as error:
        if leader:
            _remove(unfinished, announce)
        announce("")
        dist.barrier(group)
        if isinstance(error, SaveError):
            raise
        failures = sorted(error.failures.items())
        raise SaveError("; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in failures)) from None
    if leader and keep:
        _remove_old(final, keep, announce)
    announce("")
    dist.barrier(group)
    return final


def _run_on_all(action: Callable[[], Result], group: dist.ProcessGroup | None, announce: Announce) -> list[Result]:
    """Run `action` and return the results of all ranks. Raises SaveError on all ranks if it raised on any."""
    mine: tuple[Any, str]
    try:
        mine = action(), ""
    except Exception as error:
        mine = None, str(error) or type(error).__name__
    announce("")
    outcomes = gather_objects(mine, group)
    if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error]:
        raise SaveError("; ".join(failed))
    return [result for result, _ in outcomes]


# ---- Folders: only rank 0 of the group calls these ----


def hidden(folder: Path, suffix: str) -> Path:
    """A name beside `folder` for something that is not, or no longer, complete."""
    return folder.with_name(f".{folder.name}.{suffix}")


def _make_folder(unfinished: Path, announce: Announce) -> None:
    announce("creating its folder")
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    for remnant in unfinished.parent.glob(".step-*"):  # from a run that was killed
        _remove(remnant, announce)
    unfinished.mkdir()


def _complete(final: Path, manifest: Manifest, contents: Mapping[str, bytes], announce: Announce) -> None:
    """Write the last files, ending with run.json. Rename the folder when everything is on disk."""
    unfinished, removed = hidden(final, "unfinished"), hidden(final, "removed")
    for name, data in contents.items():
        announce(f"writing {name}")
        write_synced(unfinished / name, data)
    checksums = {**manifest.files, **{name: FileChecksum.of(data) for name, data in contents.items()}}
    announce(f"writing {RUN_FILE}")
    write_synced(unfinished / RUN_FILE, dataclasses.replace(manifest, files=checksums).encode())
    announce("renaming its folder")
    sync(unfinished)
    if final.exists():  # saved before: a rename cannot replace a folder that is not empty
        final.rename(removed)
    unfinished.rename(final)
    _remove(removed, announce)
    sync(final.parent)


def _remove_old(newest: Path, keep: int, announce: Announce) -> None:
    """Remove the checkpoints before `newest`, except the last `keep - 1`. Later ones belong to another run."""
    checkpoints = list_checkpoints(newest.parent)
    first = checkpoints.index(newest) if newest in checkpoints else len(checkpoints)  # the folder may be removed
    for old in checkpoints[first + keep :]:
        removed = hidden(old, "removed")  # renamed first, so that its name never stands for part of a checkpoint
        with suppress(OSError):
            old.rename(removed)
            _remove(removed, announce)


def _remove(folder: Path, announce: Announce) -> None:
    """Remove a folder file by file, as far as possible."""
    for path in folder.glob("*"):
        announce(f"removing {printable(path.name)}")
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


def write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
