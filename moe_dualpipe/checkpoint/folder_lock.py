"""One writer for a folder: a second run or export would break what the first one writes.

On a file system, the lock is `flock` on a file. The kernel releases it when the process dies. It holds for all machines
if NFS or Lustre is mounted with locks. On an object store, the lock is a marker: a file that is created only if there
is none, and written again every RENEW seconds. Another process may replace a marker that is older than EXPIRES seconds
by the store's clock, or whose process has died on this machine. Only one succeeds: the write names the version that it
replaces.
"""

import errno
import fcntl
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..data import stores
from ..data.stores.local_copies import open_locked
from ..messages import printable

LOCK_FILE = ".lock"
GRACE = 2.0
"""Seconds that a lock is waited for: a process that was just killed may still be ending."""
RENEW, EXPIRES = 30.0, 120.0
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderInUseError(ValueError):
    """Another process writes to the folder."""


@contextmanager
def only_writer(folder: Path, lock_file: Path, wait: float = GRACE) -> Iterator[None]:
    """Hold the lock of `folder` in `lock_file`, which may stand for a URL.

    Raises FolderInUseError if another process still has it after `wait` seconds, and OSError if there can be no lock.
    """
    end, url = time.monotonic() + wait, stores.url_of(lock_file)
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(_lock(lock_file, folder) if url is None else _marker(url, folder))
                break
            except FolderInUseError:
                if time.monotonic() >= end:
                    raise
            time.sleep(0.1 if url is None else 1.0)
        yield


def _holder() -> bytes:
    """What the holder of a lock writes into it: who it is, its machine, and what tells it from all others."""
    return f"process {os.getpid()} on {socket.gethostname()}\n{_machine()}\n{uuid.uuid4().hex}\n".encode()


def _in_use(folder: Path, written: bytes, note: str = "") -> FolderInUseError:
    """written: by the holder."""
    who = printable(written.decode(errors="replace").partition("\n")[0] or "another process", 100)
    return FolderInUseError(
        f"{printable(folder)} is being written by {who}{note}: wait until it ends, stop it, or use another folder"
    )


def _machine() -> str:
    """Where process ids mean the same: one start of a machine, and one container. Linux only; else ""."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
    return ""


# ---- A file system ----


@contextmanager
def _lock(path: Path, folder: Path) -> Iterator[None]:
    made = [parent for parent in path.parents if not parent.exists()]
    if made:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = open_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(folder, path.read_bytes() if path.exists() else b"") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        yield
        return
    held = [descriptor]
    # A child that outlives this process must not keep the lock.
    os.register_at_fork(after_in_child=lambda: os.close(held.pop()) if held else None)
    try:
        if not path.exists() or os.fstat(descriptor).st_ino != path.stat().st_ino:  # its holder has just removed it
            raise _in_use(folder, b"")
        try:
            with suppress(OSError):  # a full disk
                os.truncate(descriptor, 0)
                os.write(descriptor, _holder())
            yield
        finally:
            path.unlink(missing_ok=True)
            with suppress(OSError):  # a folder in which nothing was written goes, too
                for parent in made:
                    parent.rmdir()
    finally:
        os.close(held.pop())


# ---- An object store ----


@contextmanager
def _marker(url: stores.Url, folder: Path) -> Iterator[None]:
    if (found := stores.info(url)) is not None:
        _check_abandoned(url, found, folder)
    content, released = _holder(), threading.Event()
    try:
        options = _write_marker(url, content, {"mode": found.version if found else "create"})
    except stores.ChangedError:  # another one was faster
        raise _in_use(folder, stores.read(url)) from None
    except stores.StorageError:  # a server without conditional writes
        options = _write_marker(url, content, {})
    arguments = url, content, options, folder, released
    threading.Thread(target=_renew, args=arguments, daemon=True, name="folder lock").start()
    try:
        yield
    finally:
        released.set()
        with suppress(OSError):
            stores.delete(url)


def _check_abandoned(url: stores.Url, found: stores.Entry, folder: Path) -> None:
    """Raise FolderInUseError if the holder of a marker may still be there."""
    written, probe = stores.read(url), url.parent / f"{url.name}-{uuid.uuid4().hex}"
    stores.write(probe, b"")
    now = stores.info(probe)
    stores.delete(probe)
    age = (now.modified - found.modified).total_seconds() if now and now.modified and found.modified else 0.0
    who, machine, *_ = [*written.decode(errors="replace").split("\n"), ""]
    died = machine == _machine() != "" and not Path("/proc", who.split()[1]).exists()
    if age < EXPIRES and not died:
        note = f" (seen {age:.0f} s ago; if it has died, try again in {EXPIRES - age:.0f} s)"
        raise _in_use(folder, written, note)


def _write_marker(url: stores.Url, content: bytes, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that replace only what was written. Raises ChangedError if another process was faster."""
    try:
        stores.write(url, content, **options)
    except stores.ChangedError:
        if stores.read(url) != content:  # else an earlier attempt has written it, and its answer was lost
            raise
    found = stores.info(url)
    return {"mode": found.version} if found and options else {}


def _renew(
    url: stores.Url, content: bytes, options: dict[str, Any], folder: Path, released: threading.Event
) -> None:  # fmt: skip
    while not released.wait(RENEW):
        try:
            options = _write_marker(url, content, options)
        except stores.ChangedError:
            sys.stderr.write(f"{printable(folder)}: another process has taken over the folder: this one ends\n")
            os._exit(1)  # before it writes anything more
        except stores.StorageError:
            pass  # the store cannot be reached: again, the next time
