"""Standard output and standard error that may fail: a full disk, a pipe without a reader, a closed terminal.

What is printed matters less than the program that prints it. So training replaces both streams by ones that drop what
cannot be written, say so once, and try again with the next text. Everything that prints is covered: progress bars,
warnings, tracebacks, and the flush at exit, whose failure would change the exit code. Only writes to the file
descriptor itself (`os.write`) can still fail.
"""

import io
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO


def protect_streams(*names: str) -> None:
    """Replace `names`, of "stdout" and "stderr", by streams that never raise. Opens all standard streams.

    Does nothing to a stream that the program has replaced.
    """
    open_closed_streams()
    for name in names:
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            setattr(sys, name, never_failing(stream, _warn if name == "stdout" else None))


def open_closed_streams() -> None:
    """Open the null device for each standard stream that is closed, as by `>&-`.

    Otherwise the next file gets its descriptor, and everything that is printed is written into that file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor: this one
            os.set_inheritable(descriptor, True)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends


def never_failing(stream: TextIO, on_failure: Callable[[OSError], object] | None = None) -> TextIO:
    """A stream to the same file. It drops what cannot be written; `on_failure` gets the first error.

    Characters that the encoding lacks are written as escapes.
    """
    stream.flush()
    raw = _NeverFailing(stream.fileno(), on_failure)
    line_buffering = getattr(stream, "line_buffering", True)
    return io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, "backslashreplace", line_buffering=line_buffering)


class _NeverFailing(io.FileIO):
    def __init__(self, descriptor: int, on_failure: Callable[[OSError], object] | None):
        super().__init__(descriptor, "w", closefd=False)
        self._on_failure = on_failure

    def write(self, data) -> int:
        """Returns len(data) if none of it could be written."""
        try:
            written = super().write(data)
        except OSError as error:
            if (on_failure := self._on_failure) is not None:
                self._on_failure = None
                on_failure(error)
            written = None
        return len(data) if written is None else written  # None: the descriptor does not block, and its buffer is full


def _warn(error: OSError) -> None:
    text = f"{Path(sys.argv[0]).name}: warning: standard output cannot be written: {error.strerror}\n"
    with suppress(OSError):
        os.write(2, text.encode())
