"""After `torchrun --max-restarts`, a run finds the folder of its own earlier attempt and goes on in it.

Every launcher marks the folder before its ranks first meet, with a file named after itself. A checkpoint is written
after that, so where there is one to go on from, the marks of all launchers are there: ranks on any number of machines
decide alike without asking each other, from files that nobody writes any more.
"""

import json
import os
import socket
import time
from pathlib import Path

from ..checkpoint import find_checkpoint, list_checkpoints


def mark(folder: Path, local_rank: int) -> None:
    """Leave this launcher's mark in the run's folder, if there is a launcher that may come back."""
    path = _mark(folder)
    if path is not None and local_rank == 0 and not path.exists():
        path.parent.mkdir(exist_ok=True)
        started = time.strftime("%Y-%m-%d %H:%M:%S%z")
        path.write_text(json.dumps({"started": started, "run_id": os.environ["TORCHELASTIC_RUN_ID"]}) + "\n")


def is_ours(folder: Path | str) -> bool:
    """Whether an earlier attempt of this launcher worked in `folder`."""
    path = _mark(Path(folder))
    return path is not None and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0 and path.exists()


def newest(folder: Path | str) -> Path | None:
    """The newest complete checkpoint that earlier attempts of this launcher wrote into `folder`, if any.

    Older ones may be of a run that was resumed from the middle: they are of another future.
    """
    path = _mark(Path(folder))
    if path is None or not is_ours(folder):
        return None
    since = path.stat().st_mtime
    for candidate in list_checkpoints(Path(folder, "checkpoints")):
        if candidate.stat().st_mtime >= since:
            try:
                return find_checkpoint(str(candidate))
            except ValueError:
                continue
    return None


def _mark(folder: Path) -> Path | None:
    """This launcher's file: torchrun starts its attempts as children of one and the same process."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    launcher = os.getppid()
    try:  # when it was started, so that another process with its number is not taken for it
        since = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        since = ""
    return folder / "launchers" / f"{socket.gethostname()}-{launcher}-{since}.json"
