"""What a `prepare_data` that was killed had finished, so that the next call continues there.

The journal is written about once a second, after the files that it describes are on the disk. What was written to them
later is cut off. It has two entries: after the last part, and before the file that was read last. The second one counts
if that file was changed since, for example because a line of it was invalid.
"""

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import strict_json
from .split_writer import Encoder, SplitWriter
from .synced_files import write_synced

JOURNAL = "progress.json"
INTERVAL = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class Finished:
    """The finished parts of a job.

    job: a hash of its options. parts: their number. files: a hash of the finished parts. rows: of the last file that
    were read. sizes: of the two files, in bytes. The others are those of `SplitWriter`.
    """

    job: str
    parts: int = 0
    files: str = ""
    rows: int = 0
    sizes: tuple[int, int] = (0, 0)
    documents: tuple[int, int] = (0, 0)
    text_bytes: tuple[int, int] = (0, 0)
    open_tokens: int = 0
    open_bytes: int = 0

    @classmethod
    def read(cls, folder: Path) -> "list[Finished]":
        """The entries of the journal in `folder`, the last one first; [] if there is none, or if it is not valid."""
        try:
            entries: Any = strict_json.parse((folder / JOURNAL).read_bytes())
            lists_to_tuples: Any = [
                {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
                for entry in entries
            ]
            return [cls(**fields) for fields in lists_to_tuples]
        except (OSError, ValueError, TypeError, AttributeError):
            return []

    def restore(self, encoder: Encoder, folder: Path, names: tuple[str, str]) -> SplitWriter:
        """Open the two files, cut to what was finished. Raises ValueError or OSError if they are shorter."""
        files = []
        for name, size in zip(names, self.sizes, strict=True):
            file = (folder / name).open("r+b" if size else "w+b")
            files.append(file)
            if os.fstat(file.fileno()).st_size < size:
                raise ValueError(f"{name} is shorter than its journal says")
            file.truncate(size)
            file.seek(size)
        writer = SplitWriter(encoder, *files)
        writer.documents, writer.text_bytes = [*self.documents], [*self.text_bytes]
        writer.open_tokens, writer.open_bytes = self.open_tokens, self.open_bytes
        return writer


class Journal:
    """Writes `Finished` into a folder, at most once per INTERVAL. before_file: the entry before the current file."""

    def __init__(self, folder: Path, before_file: Finished):
        self._folder, self._last = folder, 0.0
        self._before_file = before_file

    def start_file(self, finished: Finished, writer: SplitWriter) -> None:
        """The next part is of another file than those of `finished`."""
        self._before_file = _entry(finished, writer)

    def update(self, finished: Finished, writer: SplitWriter) -> None:
        """The parts of `finished` are written. The other counts come from `writer`."""
        if self._last and time.monotonic() < self._last + INTERVAL:
            return
        for file in (writer.train, writer.held_out):
            file.flush()
            os.fsync(file.fileno())
        self.write(_entry(finished, writer))
        self._last = time.monotonic()

    def write(self, finished: Finished) -> None:
        path = self._folder / JOURNAL
        entries = [dataclasses.asdict(entry) for entry in (finished, self._before_file)]
        write_synced(path.with_suffix(".new"), json.dumps(entries).encode())
        path.with_suffix(".new").replace(path)


def _entry(finished: Finished, writer: SplitWriter) -> Finished:
    return dataclasses.replace(
        finished, sizes=(writer.train.tell(), writer.held_out.tell()), documents=tuple(writer.documents),
        text_bytes=tuple(writer.text_bytes), open_tokens=writer.open_tokens, open_bytes=writer.open_bytes,
    )  # fmt: skip
