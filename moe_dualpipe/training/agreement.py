"""What the ranks of an elastic run agree on before they plan it: free memory, the checkpoint to resume from, versions.

A machine that was added knows nothing of earlier attempts, and may see the files of others late. So the first rank
looks, and tells the others.
"""

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint import find_checkpoint, list_checkpoints
from ..checkpoint.destinations import STEP_FOLDER
from ..checkpoint.manifest import RUN_FILE
from ..data import stores as storage
from ..health.watch import joining
from ..messages import printable
from ..runtime.groups import leave_store, rendezvous
from ..runtime.launch import Launch, choose_device, count_gpus
from ..runtime.memory import free_gpu_memory, free_main_memory
from ..runtime.versions import OtherVersionsError, other_versions, own_versions
from . import metrics
from .config import TrainConfig
from .resolve import run_folder

SEPARATE_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""With 1, torchrun chooses a new store for the ranks after each change of machines. Otherwise its agents keep the first
one, also if another machine has become the first: their ranks would never meet."""

LEAVING = 10.0
"""Seconds for which the first rank keeps the store when the ranks cannot agree. Others may have found no problem."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """free: bytes that each rank can use at least; None: unknown. resume: the newest intact checkpoint of the run.

    before: the last division of the run, in words; "" if there is none. store: where the ranks have met.
    """

    free: int | None = None
    resume: Path | None = None
    before: str = ""
    store: dist.Store | None = None


NOTHING_AGREED = Agreed()


def agree(config: TrainConfig, launch: Launch) -> Agreed:
    """Agree with the other ranks. Collective with --elastic; without it, does nothing.

    Raises ValueError for options that cannot work, and OtherVersionsError.
    """
    if config.parallel.elastic is None:
        return NOTHING_AGREED
    folder = elastic_folder(config)
    if launch.world_size > launch.local_world_size and os.environ.get(SEPARATE_STORE) != "1":
        raise ValueError(f"--elastic on several machines needs {SEPARATE_STORE}=1 in the environment of torchrun")
    own = {"place": [socket.gethostname(), own_versions()], "free": _free_memory(config, launch)}
    if launch.world_size == 1:
        return Agreed(own["free"], newest_checkpoint(folder), last_division(folder))
    store, timeout = None, config.health.timeout
    with joining(launch.rank, timeout):
        store = rendezvous(launch, timeout)
        store.set(f"elastic/{launch.rank}", json.dumps(own))
        if launch.rank == 0:
            told = [json.loads(store.get(f"elastic/{rank}")) for rank in range(launch.world_size)]
            store.set("elastic", json.dumps(_decide(told, folder)))
        decided = json.loads(store.get("elastic"))
    try:
        if problem := decided.get("problem"):
            raise OtherVersionsError(problem, decided["machines"]) if decided["machines"] else ValueError(problem)
        return Agreed(decided["free"], _checkpoint_named(decided["resume"], folder), decided["before"], store)
    except (OtherVersionsError, ValueError):
        leave_store(store, launch.rank, launch.world_size, LEAVING)  # it is on the first rank, and others still read
        raise


def _decide(told: Sequence[Mapping[str, Any]], folder: Path) -> dict[str, Any]:
    problem, machines = other_versions([one["place"] for one in told])
    if problem:
        return {"problem": problem, "machines": machines}
    try:
        resume, before = newest_checkpoint(folder), last_division(folder)
    except (ValueError, OSError) as error:
        return {"problem": str(error), "machines": []}
    known = [one["free"] for one in told if one["free"] is not None]
    return {"free": min(known, default=None), "resume": resume.name if resume else "", "before": before}


def _checkpoint_named(name: str, folder: Path) -> Path | None:
    """The checkpoint that the first rank has found. Raises ValueError if it cannot be read from here."""
    if not name:
        return None
    path = folder / "checkpoints" / name
    if storage.url_of(folder) is not None:
        return find_checkpoint(str(path))
    if not (path / RUN_FILE).is_file():
        raise ValueError(f"{path} is not on {socket.gethostname()}: --out must be a folder that all machines share")
    return path


def _free_memory(config: TrainConfig, launch: Launch) -> int | None:
    """Bytes that this rank can use: of its GPU, or its share of the main memory."""
    if choose_device(config.compute.device, count_gpus(), launch.local_world_size) == "cuda":
        return free_gpu_memory(torch.device("cuda", launch.local_rank))
    main = free_main_memory()
    return None if main is None else main // launch.local_world_size


def elastic_folder(config: TrainConfig) -> Path:
    """The run's folder. Raises ValueError if it is not named, or if the run would not go on from its newest checkpoint:
    a machine that is added later finds it there."""
    options = config.checkpoint
    if not options.out and not options.resume:
        raise ValueError("--elastic needs --out: a machine that is added later finds the run in this folder")
    folder = run_folder(options, config.name, elastic=True)
    if options.resume and STEP_FOLDER.fullmatch(Path(options.resume).name):
        own = run_folder(replace(options, out=None), config.name, elastic=True)
        if own == folder:
            what = f"--elastic goes on from the newest checkpoint of {printable(folder)}"
            raise ValueError(f"{what}: use another --out to start at {printable(options.resume)}")
    return folder


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest intact checkpoint of a run; None if there is none yet. Raises ValueError if all are broken."""
    return find_checkpoint(str(folder)) if list_checkpoints(folder / "checkpoints") else None


def last_division(folder: Path) -> str:
    """The division that the run had last, in words; "" if none was recorded. Raises ValueError for invalid metrics."""
    if not (folder / metrics.FILE).exists():
        return ""
    return next((r["division"] for r in reversed(metrics.read_records(folder)) if "division" in r), "")
