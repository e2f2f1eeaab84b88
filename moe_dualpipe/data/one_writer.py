"""Folders with one writer: a second run, export or preparation would break what the first one writes.

A folder that somebody reads may have a shared lock, which keeps its writer from removing it.

The lock is `flock` on a file. The kernel releases it when the process dies. It holds for all machines if NFS or Lustre
is mounted with locks. Object stores have no locks: there, it holds for the processes of one machine. If two machines
write the same checkpoint, its files do not match its checksums, and it is skipped.

The filelock library, on which torch depends, does not say who holds a lock, and does not free it while a child of a
killed process is running.
"""

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..messages import printable

LOCK_FILE = ".lock"
GRACE = 2.0
"""Seconds to wait for a lock: a process that was just killed may still be ending."""
LOST = 120.0
"""Seconds after which a file server has released the locks of a machine that was lost."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderInUseError(ValueError):
    """Another process writes to the folder."""


@contextmanager
def only_writer(folder: Path, lock_file: Path, wait: float | None = None) -> Iterator[None]:
    """Hold the lock of `folder` in `lock_file`. If the folder stands for a URL, it holds on this machine only.

    Raises FolderInUseError if another process still has it after `wait` seconds (None: GRACE), and OSError if the lock
    file cannot be created.
    """
    made = [parent for parent in lock_file.parents if not parent.exists()]
    end = time.monotonic() + (GRACE if wait is None else wait)
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    while (descriptor := try_lock(lock_file)) is None:
        if time.monotonic() >= end:
            raise _in_use(folder, lock_file)
        time.sleep(0.1)
    held = [descriptor]
    # A child that outlives this process must not keep the lock.
    os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)
    try:
        with suppress(OSError):  # a full disk
            os.truncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        lock_file.unlink(missing_ok=True)
        with suppress(OSError):  # also remove a folder in which nothing was written
            for parent in made:
                parent.rmdir()
        os.close(held.pop())


def try_lock(path: Path, kind: int = fcntl.LOCK_EX, flags: int = os.O_RDWR | os.O_CREAT) -> int | None:
    """The descriptor of a locked file; None if another process has the lock, or has just removed the file.

    kind: LOCK_EX, or LOCK_SH for one that others may share. flags: with which the file is opened. Raises OSError.
    """
    try:
        descriptor = open_locked(path, kind | fcntl.LOCK_NB, flags)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.open(path, flags)
    if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
        return descriptor
    os.close(descriptor)  # it has just been removed
    return None


def _in_use(folder: Path, lock_file: Path) -> FolderInUseError:
    written = lock_file.read_bytes() if lock_file.exists() else b""
    who = printable(written.decode(errors="replace") or "another process", 100)
    return FolderInUseError(
        f"{printable(folder)} is being written by {who}: wait until it ends, stop it, or use another folder"
    )


def open_locked(path: Path, kind: int = fcntl.LOCK_EX, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """A descriptor that holds a lock of this kind on a file until it is closed, or the process dies.

    flags: with which the file is opened. Raises BlockingIOError for one that is held, if `kind` has LOCK_NB.
    """
    descriptor = os.open(path, flags, 0o666)
    try:
        fcntl.flock(descriptor, kind)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
