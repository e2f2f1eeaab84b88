"""A file that grows by whole records. What cannot be written waits in memory, and never stops the program.

The file is opened for each record. So an error of a network disk, which may appear when a file is closed, is seen in
time, and a folder that was removed during the run is made again.
"""

import errno
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def warn(text: str) -> None:
    """Print a warning on stderr, if that works."""
    with suppress(OSError):
        sys.stderr.write(f"\ntrain.py: warning: {text}\n")  # on a line of its own, after the progress bar


class AppendedFile:
    """Appends records to `path`. prepare: called before the first record, again and again until it succeeds."""

    def __init__(self, path: Path, prepare: Callable[[], object] = lambda: None):
        self.path = path
        self._prepare: Callable[[], object] | None = prepare
        self._waiting: deque[bytes] = deque()
        self._warned = False
        self.append()

    def append(self, *records: bytes) -> None:
        """Write the records that still wait, then these. If this fails, warn once, and try again in the next call."""
        self._waiting.extend(records)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self._prepare is not None:
                self._prepare()
                self._prepare = None
            while self._waiting:
                self._write(self._waiting[0])
                self._waiting.popleft()
        except OSError as error:
            if not self._warned:
                warn(f"{self.path} cannot be written: {error.strerror or error}; the run continues and tries again")
            self._warned = True

    def close(self) -> None:
        """Try a last time to write what waits, and warn if that fails."""
        self.append()
        if self._waiting or self._prepare is not None:
            warn(f"{self.path} lacks the last {len(self._waiting)} records")

    def _write(self, record: bytes) -> None:
        """Write all of `record` or nothing."""
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(record) != len(record):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    file.truncate(end)
                raise
