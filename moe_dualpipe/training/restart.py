"""Where a launch writes its run, and where it goes on after a restart: what the ranks agree on before they join.

torchrun starts the ranks anew after one failed, or after a machine was lost or added (`--nnodes 2:4`). Every launcher
leaves a file named after itself in the run's folder, so a restarted run finds the folder of its own earlier attempt,
and resumes from its newest checkpoint. A machine that was added knows nothing of earlier attempts, and may see the
files of others late. So all tell the rendezvous store what they know, and the first rank tells all what holds.
"""

import os
import shutil
import socket
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ..checkpoint import find_checkpoint
from ..checkpoint.destinations import hold_newest
from ..checkpoint.manifest import RUN_FILE
from ..data import stores
from ..data.files import GRACE, LOCK_FILE, LOST, only_writer, replace_file
from ..health.watch import joining
from ..messages import describe
from ..runtime.groups import decide_for_all, leave_store, rendezvous
from ..runtime.launch import Launch
from ..runtime.memory import free_gpu_memory, free_main_memory
from ..runtime.shared_errors import gather_objects
from .metrics import FILE as METRICS_FILE


@dataclass(frozen=True, slots=True)
class Agreed:
    """folder: of the run. resume: the checkpoint to go on from after a restart. free: bytes that each rank can use.

    resume is None for a new run, and free if it is unknown. store: the rendezvous store. newest: the step of the newest
    checkpoint of the run that this one starts from.
    """

    folder: Path | None
    resume: Path | None = None
    free: int | None = None
    store: dist.Store | None = None
    newest: int | None = None


def agree(
    folder: Path | None, device: torch.device, launch: Launch, timeout: float, stack: ExitStack | None = None,
    start: str | None = None,
) -> Agreed:  # fmt: skip
    """Collective over the processes of `launch`. folder: where this process would write the run.

    start: the run or the weights to start from. stack: holds the lock of the run's folder, on the first rank, until it
    is closed; None: no lock. Raises ValueError, on all ranks, if another process has the lock, and if the checkpoint
    that others go on from, or `start`, cannot be read here.
    """
    newest = newest_checkpoint(folder) if folder else None
    own = {"folder": str(folder or ""), "resume": newest.name if newest else "", "free": _free(device, launch)}
    store = None
    if dist.is_initialized() or launch.world_size == 1:
        told = gather_objects(own)
        decided = gather_objects(_decide(told, stack, start) if launch.rank == 0 else {})[0]
    else:
        with joining(launch.rank, timeout):
            store = rendezvous(launch, timeout)
            decided = decide_for_all(
                store, launch, "agree", own, lambda told: [_decide(told, stack, start)] * launch.world_size
            )
            # One that stops now must not take the store away before all have read.
            leave_store(dist.PrefixStore("agreement", store), launch.rank, launch.world_size, timeout)
    if decided["problem"]:
        raise ValueError(decided["problem"])
    if not decided["resume"]:
        return Agreed(folder, None, decided["free"], store, decided["newest"])
    where = Path(decided["folder"])
    resume = where / "checkpoints" / decided["resume"]
    if stores.url_of(where) is None and not (resume / RUN_FILE).is_file():
        raise ValueError(f"{resume} cannot be read here: --out must be a folder or URL that all machines share")
    return Agreed(where, find_checkpoint(str(resume)), decided["free"], store)


def _decide(told: list[dict], stack: ExitStack | None, start: str | None) -> dict:
    """What holds for all ranks. problem: why the folder cannot be locked, or `start` be read; "" if they can."""
    known = [one["free"] for one in told if one["free"] is not None]
    goes_on = next((one for one in told if one["resume"]), told[0])
    decided = {**goes_on, "free": min(known, default=None), "problem": "", "newest": None}
    try:
        if stack is not None and decided["folder"]:
            folder = Path(decided["folder"])
            wait = LOST if decided["resume"] else GRACE  # the first rank may have been on a machine that was lost
            stack.enter_context(only_writer(folder, folder / LOCK_FILE, wait))
        decided["newest"] = None if decided["resume"] else hold_newest(start)
    except (ValueError, OSError) as error:
        decided["problem"] = describe(error)
    return decided


def _free(device: torch.device, launch: Launch) -> int | None:
    """Bytes that this rank can use: of its GPU, or its share of the main memory."""
    if device.type == "cuda":
        return free_gpu_memory(device)
    main = free_main_memory()
    return None if main is None else main // launch.local_world_size


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
    if url is None or launch.local_rank or is_own_folder(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
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
