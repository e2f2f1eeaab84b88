"""Read files that others may write to, replace or remove, without waiting and without dying.

Memory-mapping would be simpler, but a mapped page that has vanished, because the file was truncated or its disk failed,
kills the process by SIGBUS. `pread` reports an error instead, and is faster for the windows of a batch (32 windows of
1,024 uint16: 91 us, 170 us mapped).
"""

import os
import stat
import weakref
from pathlib import Path

from ..messages import printable

_KINDS = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip


class DataFile:
    """A regular file, open for reading, with the size that it had when it was opened.

    It must stay as it is: `check_unchanged` finds whether it was written to. If another file takes its name, this one
    stays open. Raises ValueError, which names the file, if it cannot be read or is not a regular file.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            if problem := not_regular(os.stat(path).st_mode):  # opening a device may have effects
                raise ValueError(f"cannot read {printable(path)}: it is {problem}, not a regular file")
            # O_NONBLOCK: never wait for the writer of a FIFO that has just taken the name.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            self.close = weakref.finalize(self, os.close, descriptor)
            self._descriptor, opened = descriptor, os.fstat(descriptor)
        except OSError as error:
            raise ValueError(f"cannot read {printable(path)}: {error.strerror}") from None
        self.size, self._written = opened.st_size, opened.st_mtime_ns

    def __enter__(self) -> "DataFile":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def read(self, first: int, size: int) -> bytes:
        """Return exactly `size` bytes from offset `first`. Raises ValueError if they cannot be read."""
        parts = []
        try:
            while size > 0 and (part := os.pread(self._descriptor, size, first)):
                parts.append(part)
                first, size = first + len(part), size - len(part)
        except OSError as error:
            raise ValueError(f"cannot read {printable(self.path)} at byte {first}: {error.strerror}") from None
        if size > 0:
            self.check_unchanged()
            raise ValueError(f"cannot read {printable(self.path)}: it ends at byte {first}, before its size")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def check_unchanged(self) -> None:
        """Raise ValueError if the file was written to since it was opened."""
        now = os.fstat(self._descriptor)
        if (now.st_size, now.st_mtime_ns) != (self.size, self._written):
            sizes = f"{self.size} bytes then, {now.st_size} now" if now.st_size != self.size else f"{self.size} bytes"
            raise ValueError(
                f"{printable(self.path)} was written to while it was in use ({sizes}): do not change data in place; "
                "write another file, then rename it"
            )


def not_regular(mode: int) -> str:
    """What a file with this `st_mode` is, "a FIFO" for example; "" for a regular file."""
    return "" if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "a special file")


def read_whole(path: Path, limit: int = 1 << 28) -> bytes:
    """Return the content of a file. Raises ValueError if it cannot be read or has more than `limit` bytes."""
    with DataFile(path) as file:
        if file.size > limit:
            raise ValueError(f"cannot read {printable(path)}: it has {file.size:,} bytes, and at most {limit:,} fit")
        return file.read(0, file.size)
