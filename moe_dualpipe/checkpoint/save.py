"""Write checkpoints completely or not at all, while training continues.

Training waits only for a copy of the state in host memory. A thread writes the copy and talks to the threads of other
ranks over a separate gloo group, so its collectives never mix with those of training. The folder gets its final name
after all bytes are on disk. If one rank cannot write (disk full), the save fails on all ranks, and training goes on.
The cost is host memory for one copy of the rank's weights and optimizer state.
"""

import dataclasses
import io
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from ..messages import printable
from ..models import ModelConfig
from ..runtime.groups import create_group
from .manifest import RUN_FILE, TENSORS_FILE, FileChecksum, Manifest, encode_tensors

Result = TypeVar("Result")

STEP_FOLDER = re.compile(r"step-(\d+)")
_WAIT_SECONDS = 1.0


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
        self, run: Path, model: ModelConfig, keep: int, timeout: float, background: bool = True,
        on_wait: Callable[[], object] = lambda: None,
    ):  # fmt: skip
        """background: if False, `start` waits for the save. on_wait: called every second while waiting for the disk."""
        self.run, self.model, self.keep, self.background, self.on_wait = run, model, keep, background, on_wait
        group = create_group(backend="gloo", timeout=timeout)
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
            self._finish(self._pending)

    def wait(self) -> SaveResult | None:
        """Wait for the last save and return its result, or None if that was already returned."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        self._finish(pending)
        return pending.result()

    def _finish(self, pending: futures.Future[SaveResult]) -> None:
        while futures.wait([pending], timeout=_WAIT_SECONDS).not_done:
            self.on_wait()

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
        try:
            return SaveResult(step, save_checkpoint(self.run, step, state, self.model, extra, self.keep, self._group))
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
    keep: int = 0, group: dist.ProcessGroup | None = None,
) -> Path:  # fmt: skip
    """Save `state` (global name -> tensor) as the checkpoint after `step` updates. Collective over `group`.

    extra: more files, name -> contents, which rank 0 writes. keep: number of checkpoints to keep, counting this one;
    older ones are removed; 0 keeps all. Raises SaveError on all ranks if any rank could not write; then the earlier
    checkpoints are unchanged and nothing is left of this one.
    """
    final = checkpoint_folder(run, step)
    unfinished = hidden(final, "unfinished")
    leader, files = dist.get_rank(group) == 0, _ChecksumFiles()
    try:
        _run_on_all(lambda: _make_folder(unfinished) if leader else None, group)
        writer = _Writer(unfinished, files)
        dcp.save(dict(state), storage_writer=writer, process_group=group)
        checksums: dict[str, FileChecksum] = {}
        for of_rank in _run_on_all(lambda: files.checksums, group):
            checksums |= of_rank
        manifest = Manifest(step, dataclasses.asdict(model), checksums)
        more = {**(extra or {}), TENSORS_FILE: writer.tensors}
        _run_on_all(lambda: _complete(final, manifest, more) if leader else None, group)
    except (dcp.CheckpointException, SaveError) as error:
        if leader:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(group)
        if isinstance(error, SaveError):
            raise
        failures = sorted(error.failures.items())
        raise SaveError("; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in failures)) from None
    if leader and keep:
        _remove_old(final, keep)
    dist.barrier(group)
    return final


def gather_objects(mine: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Return the `mine` of every rank of `group`, or [mine] if torch.distributed is not initialized."""
    gathered = [mine]
    if dist.is_initialized():
        gathered *= dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group)
    return gathered


def raise_together(fault: str) -> None:
    """Raise ValueError on all ranks if one of them has a fault, which is the message. "": this rank has none."""
    if faults := [fault for fault in gather_objects(fault) if fault]:
        raise ValueError(faults[0])


def _run_on_all(action: Callable[[], Result], group: dist.ProcessGroup | None) -> list[Result]:
    """Run `action` and return the results of all ranks. Raises SaveError on all ranks if it raised on any."""
    mine: tuple[Any, str]
    try:
        mine = action(), ""
    except Exception as error:
        mine = None, str(error) or type(error).__name__
    outcomes = gather_objects(mine, group)
    if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(outcomes) if error]:
        raise SaveError("; ".join(failed))
    return [result for result, _ in outcomes]


# ---- Folders: only rank 0 of the group calls these ----


def hidden(folder: Path, suffix: str) -> Path:
    """A name beside `folder` for something that is not, or no longer, complete."""
    return folder.with_name(f".{folder.name}.{suffix}")


def _make_folder(unfinished: Path) -> None:
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    for remnant in unfinished.parent.glob(".step-*"):  # from a run that was killed
        shutil.rmtree(remnant, ignore_errors=True)
    unfinished.mkdir()


def _complete(final: Path, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    """Write the last files, ending with run.json. Rename the folder when everything is on disk."""
    unfinished, removed = hidden(final, "unfinished"), hidden(final, "removed")
    for name, data in contents.items():
        write_synced(unfinished / name, data)
    checksums = {**manifest.files, **{name: FileChecksum.of(data) for name, data in contents.items()}}
    write_synced(unfinished / RUN_FILE, dataclasses.replace(manifest, files=checksums).encode())
    sync(unfinished)
    if final.exists():  # saved before: a rename cannot replace a folder that is not empty
        final.rename(removed)
    unfinished.rename(final)
    shutil.rmtree(removed, ignore_errors=True)
    sync(final.parent)


def _remove_old(newest: Path, keep: int) -> None:
    """Remove the checkpoints before `newest`, except the last `keep - 1`. Later ones belong to another run."""
    checkpoints = list_checkpoints(newest.parent)
    first = checkpoints.index(newest) if newest in checkpoints else len(checkpoints)  # the folder may be removed
    for old in checkpoints[first + keep :]:
        removed = hidden(old, "removed")  # renamed first, so that its name never stands for part of a checkpoint
        with suppress(OSError):
            old.rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


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


# ---- Files that compute their checksums ----


class _ChecksumFile(io.BufferedWriter):
    """A file that computes its checksum while it is written. `error` is the OSError that torch.save would hide."""

    length: int = 0
    crc32: int = 0
    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self.length, self.crc32 = self.length + written, zlib.crc32(data, self.crc32)
        return written


class _ChecksumFiles(FileSystem):
    """The files that this rank writes, with their checksums by file name."""

    def __init__(self) -> None:
        self.checksums: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        assert mode == "wb"
        with _ChecksumFile(io.FileIO(path, "w")) as stream:
            try:
                yield stream
            except RuntimeError as error:
                raise stream.error or error from None
            self.checksums[Path(path).name] = FileChecksum(stream.length, stream.crc32)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    """Writes through `files`. On rank 0, `tensors` becomes the contents of tensors.json."""

    def __init__(self, folder: Path, files: _ChecksumFiles):
        # No copy-ahead: it would use the current device of this thread, which is always the first GPU.
        super().__init__(folder, per_thread_copy_ahead=0, sync_files=True)
        self.fs = files
        self.tensors = b""

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {written.index: written.storage_data for of_rank in results for written in of_rank}
        self.tensors = encode_tensors(metadata, places)
