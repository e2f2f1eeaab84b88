"""Append whole records to a file. Records that cannot be written wait in memory; a failed write never ends the run.

The file is opened and closed for each record, because a network disk may report an error only when a file is closed.
A folder that is removed during the run is created again.
"""

import errno
import os
import sys
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

    def __init__(self, path: Path, prepare: Callable[[], object]):
        self.path, self._prepare = path, prepare
        self._waiting: list[bytes] = []
        self._prepared = self._warned = False
        self.append()

    def append(self, *records: bytes) -> None:
        """Write the waiting records, then these. After a failure, warn once, and try again in the next call."""
        self._waiting += records
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if not self._prepared:
                self._prepare()
                self._prepared = True
            if self._waiting:
                self._write(b"".join(self._waiting))
            self._waiting = []
        except OSError as error:
            if not self._warned:
                warn(f"{self.path} cannot be written: {error.strerror or error}; the run continues and tries again")
            self._warned = True

    def close(self) -> None:
        """Try one last time to write the waiting records, and warn if that fails."""
        self.append()
        if self._waiting or not self._prepared:
            warn(f"{self.path} lacks the last {plural(len(self._waiting), 'record')}")

    def _write(self, records: bytes) -> None:
        """Write all of `records` or nothing."""
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(records) != len(records):
                with suppress(OSError):
                    file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
