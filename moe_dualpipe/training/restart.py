"""After `torchrun --max-restarts`, a run finds the folder of its own earlier attempt and resumes there.

Before the ranks connect, every launcher writes a file named after itself into the run's folder. Checkpoints are written
later. So if there is a checkpoint, the files of all launchers exist, and ranks on any number of machines make the same
decision without communication.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from ..checkpoint import RUN_FILE, find_checkpoint, list_checkpoints
from ..data import stores as storage


def mark_folder(folder: Path, local_rank: int) -> None:
    """Write the launcher's file into the run's folder. Does nothing without a launcher.

    Raises ValueError if there can be no such file: after a restart, the run would not be found.
    """
    path = _launcher_file(folder)
    if path is not None and local_rank == 0 and not path.exists():
        started = time.strftime("%Y-%m-%d %H:%M:%S%z")
        try:
            path.parent.mkdir(exist_ok=True)
            content = {"started": started, "run_id": os.environ["TORCHELASTIC_RUN_ID"], "before": _stamps(folder)}
            path.write_text(json.dumps(content) + "\n")
        except OSError as error:
            if not path.exists():  # an empty one will do: the contents are for people
                raise ValueError(f"cannot write {path}: {error.strerror}") from None


def is_own_folder(folder: Path) -> bool:
    """Whether an earlier attempt of this launcher used `folder`."""
    path = _launcher_file(folder)
    return path is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and path.exists()


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest complete checkpoint that earlier attempts of this launcher wrote into `folder`.

    Ignores older checkpoints: those of a run that was resumed at an earlier step may be of later steps.
    """
    path = _launcher_file(folder)
    if path is None or not is_own_folder(folder):
        return None
    for candidate in _later_checkpoints(folder, path):
        with suppress(ValueError):
            return find_checkpoint(str(candidate))
    return None


def _later_checkpoints(folder: Path, launcher_file: Path) -> list[Path]:
    """The checkpoints that were written after the launcher's file, newest first."""
    found = list_checkpoints(Path(folder, "checkpoints"))
    if storage.url_of(folder) is None:
        since = launcher_file.stat().st_mtime
        return [path for path in found if path.stat().st_mtime >= since]
    before = json.loads(launcher_file.read_text())["before"]  # the clock of a store may be another one
    return [path for path in found if before.get(path.name) != _stamps(folder)[path.name]]


def _stamps(folder: Path) -> dict[str, str]:
    """Of a run on a store: for each checkpoint, what tells it from another one of the same step."""
    if (url := storage.url_of(folder)) is None:
        return {}
    names = [path.name for path in list_checkpoints(Path(folder, "checkpoints"))]
    entries = {name: storage.info(url / "checkpoints" / name / RUN_FILE) for name in names}
    return {name: entry.stamp for name, entry in entries.items() if entry}


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
