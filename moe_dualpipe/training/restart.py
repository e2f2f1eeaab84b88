"""After `torchrun --max-restarts`, a run finds the folder of its own earlier attempt and resumes there.

Before the ranks connect, every launcher leaves a file named after itself in the run's folder. The ranks then agree on
the checkpoint to go on from (agreement.py): the newest one, because a folder has the checkpoints of one run.
"""

import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path

from ..checkpoint import find_checkpoint
from ..data import stores
from ..data.synced_files import replace_file
from ..runtime.launch import Launch
from .metrics import FILE as METRICS_FILE


def mark_folder(folder: Path, local_rank: int) -> None:
    """Leave the launcher's file in the run's folder. Does nothing without a launcher.

    Raises ValueError if there can be no such file: after a restart, the run would not be found.
    """
    path = _launcher_file(folder)
    if path is not None and local_rank == 0:
        try:
            path.parent.mkdir(exist_ok=True)
            path.touch()
        except OSError as error:
            raise ValueError(f"cannot write {path}: {error.strerror}") from None


def is_own_folder(folder: Path) -> bool:
    """Whether an earlier attempt of this launcher used `folder`."""
    path = _launcher_file(folder)
    return path is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and path.exists()


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint in `folder`, if it is that of an earlier attempt of this launcher."""
    if is_own_folder(folder):
        with suppress(ValueError):
            return find_checkpoint(str(folder))
    return None


def prepare_staged(folder: Path, launch: Launch, resumed: bool) -> None:
    """Make the local folder of a run on a store what the run's own would be. Does nothing for a local run.

    Files of an earlier run are removed, except after a restart by the launcher. A resumed run continues the metrics
    that are on the store. The first process of a machine does this for the others. Raises StorageError.
    """
    url = stores.url_of(folder)
    if url is None or launch.local_rank:
        return
    folder.mkdir(parents=True, exist_ok=True)
    if is_own_folder(folder):
        return
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    if resumed and stores.info(url / METRICS_FILE):
        replace_file(folder / METRICS_FILE, stores.read(url / METRICS_FILE))


def _launcher_file(folder: Path) -> Path | None:
    """The file of this process's launcher: torchrun starts all attempts from one process, the parent of this one."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    launcher = os.getppid()
    try:  # the start time: process ids are reused
        since = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        since = ""
    return folder / "launchers" / f"{socket.gethostname()}-{launcher}-{since}.json"
