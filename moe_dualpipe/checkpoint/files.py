"""Write the files of a checkpoint with checksums, and in pieces, to tell a slow disk from one that hangs.

A thread that waits for a disk cannot report what it does. So each operation is announced before it begins. Files are
written and synced in pieces, each of which takes at most seconds on a disk that works.
"""

import io
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from ..data.synced_files import SyncedFile
from .manifest import FileChecksum, encode_tensors

Announce = Callable[[str], object]
"""Called with the next operation on the disk, and with "" before the rank waits for others."""


class ChecksumFile(io.BufferedWriter):
    """A file that computes its checksum while it is written. `error` is the OSError that torch.save would hide."""

    length: int = 0
    crc32: int = 0
    error: OSError | None = None

    def __init__(self, path: str | os.PathLike, announce: Announce):
        announce(operation := f"writing {Path(path).name}")
        super().__init__(SyncedFile(path, "w", partial(announce, operation)))

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
        except OSError as error:
            self.error = error
            raise
        self.length, self.crc32 = self.length + written, zlib.crc32(data, self.crc32)
        return written


class ChecksumFiles(FileSystem):
    """The files that this rank writes, with their checksums by file name."""

    def __init__(self, announce: Announce) -> None:
        self.checksums: dict[str, FileChecksum] = {}
        self.announce = announce

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Iterator[io.IOBase]:  # type: ignore[override]
        assert mode == "wb"
        with ChecksumFile(path, self.announce) as stream:
            try:
                yield stream
            except RuntimeError as error:
                raise stream.error or error from None
            self.checksums[Path(path).name] = FileChecksum(stream.length, stream.crc32)

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class Writer(dcp.FileSystemWriter):
    """Writes through `files`. On rank 0, `tensors` becomes the contents of tensors.json.

    torch calls each of these methods without communication, and communicates between them.
    """

    def __init__(self, folder: Path, files: ChecksumFiles):
        # No copy-ahead: it would use the current device of this thread, which is always the first GPU.
        super().__init__(folder, per_thread_copy_ahead=0, sync_files=True)
        self.fs, self._announce = files, files.announce
        self.tensors = b""

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        with self._on_disk("creating its folder"):
            return super().prepare_local_plan(plan)

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Any:
        with self._on_disk("creating its files"):
            return super().write_data(plan, planner)

    def finish(self, metadata: dcp.Metadata, results: list[list[WriteResult]]) -> None:
        with self._on_disk("writing .metadata"):
            super().finish(metadata, results)
        places = {written.index: written.storage_data for of_rank in results for written in of_rank}
        self.tensors = encode_tensors(metadata, places)

    @contextmanager
    def _on_disk(self, operation: str) -> Iterator[None]:
        self._announce(operation)
        try:
            yield
        finally:
            self._announce("")
