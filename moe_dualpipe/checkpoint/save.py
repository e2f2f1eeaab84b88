"""Writing a checkpoint: all of it or nothing, while training goes on.

Training waits only for a copy of the state in main memory; a thread writes it, talking to the other ranks' threads in
a gloo group of its own, so that its collectives never meet the trainer's. The folder gets its final name when every
byte is on the disk. A rank that cannot write (a full disk) makes the save fail on all ranks alike, and harms nothing
else. The price is main memory for one copy of the rank's weights and moments.
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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from ..models import ModelConfig
from ..runtime.groups import create_group
from .manifest import RUN_FILE, TENSORS_FILE, FileChecksum, Manifest, encode_tensors

Result = TypeVar("Result")

STEP_FOLDER = re.compile(r"step-(\d+)")


class SaveError(OSError):
    """A checkpoint could not be written; raised on all ranks alike, with the ranks that failed and why."""


@dataclasses.dataclass(frozen=True, slots=True)
class SaveResult:
    """How a save ended: `error` is empty, or says which ranks failed and why."""

    step: int
    path: Path
    error: str = ""


class Saver:
    """Writes the checkpoints of a run, one at a time, in the background. Collective, like all its methods but poll."""

    def __init__(
        self,
        run: Path,
        model: ModelConfig,
        keep: int,
        timeout: float,
        background: bool = True,
        alive: Callable[[], object] = lambda: None,
    ):
        """alive: called once a second by whoever waits for a save, which may take as long as the disk does."""
        self.run, self.model, self.keep, self.background, self.alive = run, model, keep, background, alive
        group = create_group(backend="gloo", timeout=timeout)
        assert group is not None
        self._group = group
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[SaveResult] | None = None

    @property
    def busy(self) -> bool:
        return self._pending is not None and not self._pending.done()

    def start(self, step: int, state: Mapping[str, Tensor], extra: Mapping[str, bytes] | None = None) -> None:
        """Copy `state` and write the copy as the checkpoint after `step` updates. Call `wait` or `poll` before."""
        assert self._pending is None
        if self.background:
            state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        self._pending = self._threads.submit(self._write, step, state, extra or {})
        if not self.background:
            self._finish(self._pending)

    def wait(self) -> SaveResult | None:
        """How the save ended that was started, once it has; None when there is none that was not told of already."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        self._finish(pending)
        return pending.result()

    def _finish(self, pending: Future[SaveResult]) -> None:
        while futures.wait([pending], timeout=1.0).not_done:
            self.alive()

    def poll(self) -> SaveResult | None:
        """As `wait`, but None also while a save is on its way."""
        return None if self.busy else self.wait()

    def close(self) -> None:
        """Finish what was started. Raises nothing even if that fails, as an error is often why it is called."""
        with suppress(Exception):
            saved = self.wait()
            if saved and saved.error and dist.get_rank() == 0:
                sys.stderr.write(f"{saved.path} could not be written: {saved.error}\n")
        self._threads.shutdown()

    def _write(self, step: int, state: Mapping[str, Tensor], extra: Mapping[str, bytes]) -> SaveResult:
        final = checkpoint_folder(self.run, step)
        try:
            return SaveResult(step, save_checkpoint(self.run, step, state, self.model, extra, self.keep, self._group))
        except SaveError as error:
            return SaveResult(step, final, str(error))


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(
    run: Path,
    step: int,
    state: Mapping[str, Tensor],
    model: ModelConfig,
    extra: Mapping[str, bytes] | None = None,
    keep: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Save `state`, by global names, as the checkpoint after `step` updates. Collective over `group`.

    extra: more files for the checkpoint's folder, name -> contents; rank 0's are taken. keep: remove all but the last
    so many checkpoints, this one included, once it is complete; 0: none. Raises SaveError on all ranks alike if any
    could not write; then the checkpoints from before are all there, and nothing else.
    """
    final = checkpoint_folder(run, step)
    unfinished = _unfinished(final)
    leader, files = dist.get_rank(group) == 0, _SummedFiles()
    try:
        _alike(lambda: _make_room(unfinished) if leader else None, group)
        writer = _Writer(unfinished, files)
        dcp.save(dict(state), storage_writer=writer, process_group=group)
        sums = {name: sum for of_rank in _alike(lambda: files.sums, group) for name, sum in of_rank.items()}
        manifest = Manifest(step, dataclasses.asdict(model), sums)
        _alike(
            lambda: _complete(final, manifest, {**(extra or {}), TENSORS_FILE: writer.tensors}) if leader else None,
            group,
        )
    except (dcp.CheckpointException, SaveError) as error:
        if leader:
            shutil.rmtree(unfinished, ignore_errors=True)
        dist.barrier(group)
        raise SaveError(_reasons(error)) from None
    if leader and keep:
        _remove_old(final, keep)
    dist.barrier(group)
    return final


def _alike(part: Callable[[], Result], group: dist.ProcessGroup | None) -> list[Result]:
    """`part()` of every rank. Raises SaveError on all of them if it raised anything on any."""
    mine: tuple[Any, str]
    try:
        mine = part(), ""
    except Exception as error:
        mine = None, str(error) or type(error).__name__
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, mine, group=group)
    if failed := [f"rank {rank}: {error}" for rank, (_, error) in enumerate(everyones) if error]:
        raise SaveError("; ".join(failed))
    return [result for result, _ in everyones]


def _reasons(error: BaseException) -> str:
    if isinstance(error, dcp.CheckpointException):
        return "; ".join(f"rank {rank}: {reason}" for rank, (reason, _) in sorted(error.failures.items()))
    return str(error)


# ---- What the leader does with folders ----


def _unfinished(final: Path) -> Path:
    return final.with_name(f".{final.name}.unfinished")


def _make_room(unfinished: Path) -> None:
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    for remnant in unfinished.parent.glob(".step-*"):  # of this run, when it was killed
        shutil.rmtree(remnant, ignore_errors=True)
    unfinished.mkdir()


def _complete(final: Path, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
    """Write the last files, run.json last of all, and give the folder its name when all is on the disk."""
    unfinished = _unfinished(final)
    for name, data in contents.items():
        _write_synced(unfinished / name, data)
    sums = {**manifest.files, **{name: FileChecksum.of(data) for name, data in contents.items()}}
    _write_synced(unfinished / RUN_FILE, dataclasses.replace(manifest, files=sums).encode())
    _sync_folder(unfinished)
    if final.exists():  # saved again: a name cannot be taken over by a folder in one move
        final.rename(removed := final.with_name(f".{final.name}.removed"))
        unfinished.rename(final)
        shutil.rmtree(removed, ignore_errors=True)
    else:
        unfinished.rename(final)
    _sync_folder(final.parent)


def _remove_old(newest: Path, keep: int) -> None:
    """Keep `newest` and the `keep - 1` checkpoints before it; later ones, of a run that went on elsewhere, stay too."""
    steps = {int(match[1]): path for path in newest.parent.iterdir() if (match := STEP_FOLDER.fullmatch(path.name))}
    upto = int(newest.name.removeprefix("step-"))
    for step in sorted(step for step in steps if step <= upto)[:-keep]:
        removed = steps[step].with_name(f".{steps[step].name}.removed")  # half a checkpoint must not look like one
        with suppress(OSError):
            steps[step].rename(removed)
            shutil.rmtree(removed, ignore_errors=True)


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Files that know their checksums ----


class _SummedFile(io.BufferedWriter):
    """A file that sums what is written, and remembers why it could not be: torch.save hides that."""

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


class _SummedFiles(FileSystem):
    """What a rank writes, and the sums of that, by file name."""

    def __init__(self) -> None:
        self.sums: dict[str, FileChecksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        assert mode == "wb"
        with _SummedFile(io.FileIO(path, "w")) as stream:
            try:
                yield stream
            except RuntimeError as error:
                raise stream.error or error from None
            self.sums[Path(path).name] = FileChecksum(stream.length, stream.crc32)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    """Writes through `files`; on the leader `tensors` becomes the contents of tensors.json."""

    def __init__(self, folder: Path, files: _SummedFiles):
        # No copying ahead: it would use the current device of this thread, which is always the first GPU.
        super().__init__(folder, per_thread_copy_ahead=0, sync_files=True)
        self.fs = files
        self.tensors = b""

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {written.index: written.storage_data for of_rank in results for written in of_rank}
        self.tensors = encode_tensors(metadata, places)
