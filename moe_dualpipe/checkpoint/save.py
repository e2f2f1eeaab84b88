"""Write checkpoints completely or not at all, while training continues.

Training waits only until the state is copied to host memory. A thread writes the copy and talks to the threads of other
ranks over a separate gloo group, so its collectives never mix with those of training. The folder gets its final name
after all bytes are on disk. If one rank cannot write (disk full), the save fails on all ranks, and training continues.
No timeout ends a slow save. Instead, each operation on the disk is announced, and files are small enough to be written
in seconds, so the caller can tell a disk that hangs from a slow one. The cost is host memory for one copy of the rank's
weights and optimizer state.

torch.distributed.checkpoint can write safetensors, too (`HuggingFaceStorageWriter`), for any layout. But each rank
writes all of its tensors into one file, which it first serializes in memory. This took two more copies of the state
(1,005 MB for 500 MB), and a disk that hangs cannot be told from a slow one. Its reader maps files (tensor_file.py).
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from concurrent import futures
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from ..data import stores
from ..data.files import divide
from ..expert_parallel.gather import gather_objects
from ..messages import printable
from ..models import ModelConfig
from ..overlap.waits import waits_for_ranks
from ..runtime.groups import create_group
from ..runtime.shared_errors import errors_on_all_ranks
from .destinations import UPLOAD, RunUploads, announce_nothing, remove_old, write_folder
from .manifest import RUN_FILE, FileChecksum, Manifest
from .tensor_file import Announce, write_tensors

_WAIT_SECONDS = 24 * 3600.0
"""Seconds that a rank waits for the disks of others, however slow they are."""
_FILE_BYTES = 256 * 2**20
"""Bytes of a file. A larger tensor gets its own file."""


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
        self, run: Path, model: ModelConfig, keep: int, background: bool = True,
        announce: Announce = announce_nothing, patience: stores.Patience = UPLOAD,
    ):  # fmt: skip
        """background: if False, `start` waits for the save. announce: see `Announce`; called by a thread.

        run: a folder, or one that stands for a URL. patience: for uploads.
        """
        self.run, self.model, self.keep, self.background, self.announce = run, model, keep, background, announce
        self._patience = patience
        self._uploads = None if stores.url_of(run) is None else RunUploads(run, patience)
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
            _finished(self._pending)

    def wait(self) -> SaveResult | None:
        """Wait for the last save and return its result, or None if that was already returned."""
        pending, self._pending = self._pending, None
        return None if pending is None else _finished(pending).result()

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
        if self._uploads:
            try:
                self._uploads.send()  # the records since the last checkpoint
            except OSError as error:
                sys.stderr.write(f"{printable(error, 1000)}\n")

    def _write(self, step: int, state: Mapping[str, Tensor], extra: Mapping[str, bytes]) -> SaveResult:
        def announce(operation: str) -> None:
            self.announce(operation and f"step {step}: {operation}")

        try:
            path = save_checkpoint(
                self.run, step, state, self.model, extra, self.keep, self._group, announce, self._uploads,
                self._patience,
            )  # fmt: skip
            return SaveResult(step, path)
        except SaveError as error:
            return SaveResult(step, checkpoint_folder(self.run, step), str(error))


@waits_for_ranks
def _finished(saving: futures.Future[SaveResult]) -> futures.Future[SaveResult]:
    futures.wait([saving])
    return saving


def checkpoint_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def save_checkpoint(
    run: Path, step: int, state: Mapping[str, Tensor], model: ModelConfig, extra: Mapping[str, bytes] | None = None,
    keep: int = 0, group: dist.ProcessGroup | None = None, announce: Announce = announce_nothing,
    uploads: RunUploads | None = None, patience: stores.Patience = UPLOAD,
) -> Path:  # fmt: skip
    """Save `state` (global name -> tensor) as the checkpoint after `step` updates. Collective over `group`.

    extra: more files, name -> contents, which rank 0 writes. keep: number of checkpoints to keep, counting this one;
    older ones are removed; 0 keeps all. run: a folder, or one that stands for a URL (destinations.py). uploads: the
    other files of the run, which are uploaded before the checkpoint is complete. patience: for uploads.

    Raises SaveError on all ranks if any rank could not write; then the earlier checkpoints are unchanged, and nothing
    is left of this one in a local folder.
    """
    final, rank = checkpoint_folder(run, step), dist.get_rank(group)

    def write(folder: Path) -> dict[str, FileChecksum]:
        names = [name for name in state if owners[name] == rank]
        files: dict[str, FileChecksum] = {}
        for number, part in enumerate(divide({name: state[name].nbytes for name in names}, _FILE_BYTES)):
            path = folder / f"rank-{rank}-{number}.safetensors"
            write_tensors(path, {name: state[name] for name in part}, announce)
            announce(f"checking {path.name}")
            files[path.name] = FileChecksum.of_file(path)
        return files

    def last(ranks: list[dict[str, FileChecksum]]) -> dict[str, bytes]:
        files = {name: FileChecksum.of(data) for name, data in more.items()}
        for written in ranks:
            files |= written
        manifest = Manifest(step, dataclasses.asdict(model), files)
        return {**more, RUN_FILE: manifest.encode()}

    more, errors = extra or {}, partial(errors_on_all_ranks, group, partial(announce, ""))
    try:
        if (url := stores.url_of(final)) is not None:  # a checkpoint of this step is incomplete from now on
            with errors():
                if rank == 0:
                    stores.delete(url / RUN_FILE, patience)
        owners = _owners(gather_objects({name: tensor.nbytes for name, tensor in state.items()}, group))
        if uploads:
            with errors():
                uploads.send(announce)
        write_folder(
            final, write, last, replace=True, remnants=".step-*", group=group, announce=announce, patience=patience
        )
    except Exception as error:
        raise SaveError(str(error) or type(error).__name__) from error
    finally:
        announce("")
        dist.barrier(group)
    if rank == 0:
        remove_old(final, keep, announce, patience)
    announce("")
    dist.barrier(group)
    return final


def _owners(sizes: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The rank that writes each tensor: of those that hold it, the one with the fewest bytes so far.

    sizes: the bytes of the tensors that each rank holds.
    """
    holders: dict[str, list[int]] = {}
    for rank, held in enumerate(sizes):
        for name in held:
            holders.setdefault(name, []).append(rank)
    owners, written = dict[str, int](), [0] * len(sizes)
    for name in sorted(holders, key=lambda name: (len(holders[name]), name)):
        owner = owners[name] = min(holders[name], key=lambda rank: written[rank])
        written[owner] += sizes[owner][name]
    return owners
