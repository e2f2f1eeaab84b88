"""Create a folder completely or not at all: a checkpoint, or a folder of weights. Ranks write it together.

Its files are written into a hidden folder, which is renamed when all of them are on disk. An object store cannot
rename: there, each rank uploads the files of a folder of its own, and a file by which the folder is recognized comes
last. A file appears on a store at once and complete.

A folder has one writer: a second run or export would break what the first one writes. The lock is `flock` on a file.
The kernel releases it when the process dies. It holds for all machines if NFS or Lustre is mounted with locks. Object
stores have no locks: there, it holds for the processes of one machine. If two machines write the same checkpoint, its
files do not match its checksums, and it is skipped.
"""

import errno
import fcntl
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..data import stores
from ..data.stores.local_copies import open_locked
from ..data.synced_files import sync, write_synced
from ..expert_parallel.gather import gather_objects
from ..messages import printable
from ..runtime.shared_errors import Result
from .tensor_file import Announce

LOCK_FILE = ".lock"
GRACE = 2.0
"""Seconds that a lock is waited for: a process that was just killed may still be ending."""
LOST = 120.0
"""Seconds after which a file server has released the locks of a machine that was lost."""
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
LAST_FILE = "config.json"
"""What a folder of weights is recognized by, so it is written last."""
UPLOAD = stores.Patience(300.0)
"""How long an upload is repeated while a store cannot be reached."""


def announce_nothing(_operation: str) -> None:
    pass


def write_folder(
    final: Path, write: Callable[[Path], Result], last: Callable[[list[Result]], Mapping[str, bytes]], *,
    replace: bool = False, remnants: str = "", group: dist.ProcessGroup | None = None,
    announce: Announce = announce_nothing, patience: stores.Patience = UPLOAD,
) -> None:  # fmt: skip
    """Create the folder `final`, which may stand for a URL. Collective over `group`.

    write: called on each rank with the folder in which it writes and syncs its files. last: called on the first rank
    with the results of all ranks; returns the files that it writes then, in order. The last one completes the folder.
    replace: `final` may exist, and nobody else writes it; else it must not, and is locked. remnants: a glob of the
    hidden folders of killed writers. patience: for uploads.

    Raises ValueError if there is something at `final`, and what `write` raises; of several ranks, a ValueError or
    OSError on all, which says which ranks failed. After an error, nothing is left of the folder on this machine. If
    the process is killed, a hidden folder remains until the next call.
    """
    rank, url = dist.get_rank(group) if dist.is_initialized() else 0, stores.url_of(final)
    local = hidden(final, "unfinished" if url is None else f"rank-{rank}")
    leads, writes = rank == 0, rank == 0 or url is not None

    def create() -> None:
        if leads and not replace:
            stack.enter_context(only_writer(final, hidden(final, "lock")))
            if is_there(final):
                raise ValueError(f"{printable(final)} already exists: choose another folder")
        if writes:
            announce("creating its folder")
            stack.callback(remove, local, announce)
            left = final.parent.glob(remnants + (local.suffix if url else "")) if remnants else ()
            for remnant in (local, *left):
                remove(remnant, announce)
            local.mkdir(parents=True)

    def send() -> None:
        if url is None:
            return
        for path in sorted(local.iterdir()):
            stores.upload_file(path, url / path.name, patience, announce)

    def complete() -> None:
        for name, data in last(results).items():
            announce(f"writing {name}")
            if url is None:
                write_synced(local / name, data)
            else:
                stores.write(url / name, data, patience)
        if url is None:
            announce("renaming its folder")
            replaced = hidden(final, "removed")
            sync(local)
            if final.exists():  # a rename cannot replace a folder that is not empty
                final.rename(replaced)
            local.rename(final)
            sync(final.parent)
            remove(replaced, announce)

    with ExitStack() as stack:
        on_all_ranks(create, group, announce)
        results = on_all_ranks(lambda: write(local), group, announce)
        on_all_ranks(send, group, announce)
        on_all_ranks(lambda: complete() if leads else None, group, announce)


def on_all_ranks(
    action: Callable[[], Result], group: dist.ProcessGroup | None = None, announce: Announce = announce_nothing
) -> list[Result]:
    """Run `action` and return the results of all ranks. If it raised on any, raise on all. Collective.

    With one rank, raises its error; with several, a ValueError or OSError that says which of them failed, and why.
    """
    mine: tuple[Any, str, bool]
    failed = None
    try:
        mine = action(), "", False
    except Exception as error:
        mine, failed = (None, str(error) or type(error).__name__, isinstance(error, ValueError)), error
    announce("")
    outcomes = gather_objects(mine, group)
    if failed and len(outcomes) == 1:
        raise failed
    if faults := [(f"rank {rank}: {text}", invalid) for rank, (_, text, invalid) in enumerate(outcomes) if text]:
        raise (ValueError if faults[0][1] else OSError)("; ".join(text for text, _ in faults))
    return [result for result, _, _ in outcomes]


def hidden(folder: Path, suffix: str) -> Path:
    """A name beside `folder` for something that is not, or no longer, complete."""
    return folder.with_name(f".{folder.name}.{suffix}")


def is_there(folder: Path) -> bool:
    """Whether there is something at `folder`; on a store, a model that is complete."""
    return stores.exists(folder if stores.url_of(folder) is None else folder / LAST_FILE)


def remove(folder: Path, announce: Announce = announce_nothing) -> None:
    """Remove a folder file by file, as far as possible."""
    for path in folder.glob("*"):
        announce(f"removing {printable(path.name)}")
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(folder, ignore_errors=True)


# ---- One writer ----


class FolderInUseError(ValueError):
    """Another process writes to the folder."""


@contextmanager
def only_writer(folder: Path, lock_file: Path, wait: float | None = None) -> Iterator[None]:
    """Hold the lock of `folder` in `lock_file`. If the folder stands for a URL, it holds on this machine only.

    Raises FolderInUseError if another process still has it after `wait` seconds (None: GRACE), and OSError if there can
    be no lock.
    """
    made = [parent for parent in lock_file.parents if not parent.exists()]
    end = time.monotonic() + (GRACE if wait is None else wait)
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    while (descriptor := _locked(lock_file)) is None:
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
        with suppress(OSError):  # a folder in which nothing was written goes, too
            for parent in made:
                parent.rmdir()
        os.close(held.pop())


def _locked(path: Path) -> int | None:
    """The descriptor of a locked file; None if another process has the lock."""
    try:
        descriptor = open_locked(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return os.open(path, os.O_RDWR | os.O_CREAT)
    if path.exists() and os.fstat(descriptor).st_ino == path.stat().st_ino:
        return descriptor
    os.close(descriptor)  # its holder has just removed it
    return None


def _in_use(folder: Path, lock_file: Path) -> FolderInUseError:
    written = lock_file.read_bytes() if lock_file.exists() else b""
    who = printable(written.decode(errors="replace") or "another process", 100)
    return FolderInUseError(
        f"{printable(folder)} is being written by {who}: wait until it ends, stop it, or use another folder"
    )
