"""After `torchrun --max-restarts`, a run finds the folder of its own earlier attempt and resumes there.

Before the ranks connect, every launcher writes a file named after itself into the run's folder, with the checkpoints
that are there already. The ranks then agree on the checkpoint to go on from (agreement.py).
"""

import json
import os
import shutil
import socket
import time
from contextlib import suppress
from pathlib import Path

from ..checkpoint import RUN_FILE, find_checkpoint, list_checkpoints, read_manifest
from ..data import stores
from ..runtime.launch import Launch
from .metrics import FILE as METRICS_FILE


def mark_folder(folder: Path, local_rank: int) -> None:
    """Write the launcher's file into the run's folder. Does nothing without a launcher.

    Raises ValueError if there can be no such file: after a restart, the run would not be found.
    """
    path = _launcher_file(folder)
    if path is not None and local_rank == 0 and not path.exists():
        started = time.strftime("%Y-%m-%d %H:%M:%S%z")
        try:
            path.parent.mkdir(exist_ok=True)
            content = {"started": started, "run_id": os.environ["TORCHELASTIC_RUN_ID"], "before": _ids(folder)}
            path.write_text(json.dumps(content) + "\n")
        except OSError as error:
            if not path.exists():  # an empty one will do: the contents are for people
                raise ValueError(f"cannot write {path}: {error.strerror}") from None


def is_own_folder(folder: Path) -> bool:
    """Whether an earlier attempt of this launcher used `folder`."""
    path = _launcher_file(folder)
    return path is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and path.exists()


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint, by step, that earlier attempts of this launcher wrote into `folder`.

    Ignores older checkpoints: those of a run that was resumed at an earlier step may be of later steps. Which are older
    is decided by their ids, never by a clock.
    """
    path = _launcher_file(folder)
    if path is None or not is_own_folder(folder):
        return None
    before, now = json.loads(path.read_text())["before"], _ids(folder)
    for name in now:
        if before.get(name) != now[name]:
            with suppress(ValueError):
                return find_checkpoint(str(folder / "checkpoints" / name))
    return None


def _ids(folder: Path) -> dict[str, str]:
    """The id of each checkpoint, the largest step first. It tells a checkpoint from another one of the same step."""
    found = {}
    for path in list_checkpoints(folder / "checkpoints"):
        checkpoint = stores.local_path(path)
        stores.open_folder(checkpoint, [RUN_FILE])
        with suppress(ValueError):  # it is not whole
            found[path.name] = read_manifest(checkpoint).id
    return found


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
        partial = folder / f".{METRICS_FILE}.part"
        partial.write_bytes(stores.read(url / METRICS_FILE))
        with suppress(FileNotFoundError):
            partial.replace(folder / METRICS_FILE)


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
