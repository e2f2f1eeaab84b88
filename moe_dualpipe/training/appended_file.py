"""Append whole records to a file. Records that cannot be written wait in memory; a failed write never ends the run.

The file is opened and closed for each record, because a network disk may report an error only when a file is closed.
A folder that is removed during the run is created again.
"""

import errno
import os
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ..health.program import program_name
from ..messages import plural


def warn(text: str) -> None:
    """Print a warning on stderr, if that works."""
    with suppress(OSError):
        sys.stderr.write(f"\n{program_name()}: warning: {text}\n")  # on a line of its own, after the progress bar


class AppendedFile:
    """Appends records to `path`. prepare: called before the first record, until it succeeds once."""

    def __init__(self, path: Path, prepare: Callable[[], object] = lambda: None):
        self.path = path
        self._prepare: Callable[[], object] | None = prepare
        self._waiting: deque[bytes] = deque()
        self._warned = False
        self.append()

    def append(self, *records: bytes) -> None:
        """Write the waiting records, then these. After a failure, warn once, and try again in the next call."""
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
        """Try one last time to write the waiting records, and warn if that fails."""
        self.append()
        if self._waiting or self._prepare is not None:
            warn(f"{self.path} lacks the last {plural(len(self._waiting), 'record')}")

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
