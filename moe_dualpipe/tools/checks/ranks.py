"""Run a task on several ranks, in processes of this machine that torch.distributed (gloo) connects.

If a rank fails or hangs, all processes are ended. They are forked from a server that has already imported torch. They
import the main program, so it must be guarded by `if __name__ == "__main__":`.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException, ProcessRaisedException, start_processes

from ...errors import describe_user_error
from ...messages import describe, plural
from . import run


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that failed on a rank: the error on one line."""

    rank: int
    message: str

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


_PRELOADED = "torch._dynamo", run.__name__, __name__
"""What the server imports once for all ranks. Python ignores names of modules that do not exist."""


def run_task(
    num_ranks: int, function: Callable[..., Any], *task: Any, timeout: float = 300
) -> list[Any] | Failure:  # fmt: skip
    """Return the results of `function(*task)` on all ranks, or the first failure.

    timeout: in seconds. Raises ValueError if the task cannot be sent to another process.
    """
    set_forkserver_preload([*_PRELOADED])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            processes = start_processes(
                _main, (folder, num_ranks, function, task), num_ranks, join=False, start_method="forkserver"
            )
        except (AttributeError, TypeError, ValueError) as error:  # pickle raises any of these, and PicklingError
            raise ValueError(
                "a class or function of the model cannot be sent to another process: define it at the top level of a "
                f"file ({describe(error)})"
            ) from None
        failure = _wait(processes, folder, num_ranks, timeout)
        return failure or [torch.load(folder / f"{rank}", weights_only=False) for rank in range(num_ranks)]


def _wait(processes: Any, folder: Path, num_ranks: int, timeout: float) -> Failure | None:
    """Wait until all processes have ended. If one fails, or the time is over, end the others."""
    end = time.monotonic() + timeout
    try:
        while not processes.join(max(0.0, end - time.monotonic())):
            if time.monotonic() >= end:
                missing = min(range(num_ranks), key=lambda rank: (folder / f"{rank}").exists())
                return Failure(missing, f"no result after {plural(round(timeout), 'second')}")
        return None
    except (ProcessExitedException, ProcessRaisedException) as error:
        failed = [*folder.glob("failed-*")]
        if failed:
            return torch.load(min(failed, key=lambda file: file.stat().st_mtime_ns), weights_only=False)
        return Failure(error.error_index, f"the process ended with code {getattr(error, 'exit_code', 1)}")
    finally:
        for process in processes.processes:
            process.kill()
            process.join()


def _main(rank: int, folder: Path, num_ranks: int, function: Callable[..., Any], task: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)  # the number of threads changes the order of sums
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        torch.save(function(*task), folder / f"{rank}")
        dist.barrier()
    except (Exception, SystemExit) as error:
        torch.save(Failure(rank, describe_user_error(error)), folder / f"failed-{rank}")
        sys.exit(1)
    finally:
        dist.destroy_process_group()
