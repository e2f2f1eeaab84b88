"""Run tasks on several ranks, in processes of this machine that torch.distributed (gloo) connects.

The processes run the tasks one after the other. If a rank fails or hangs, all processes are ended, and new ones run the
remaining tasks. Processes are forked from a server that has already imported torch. They import the main program, so it
must be guarded by `if __name__ == "__main__":`.
"""

import multiprocessing
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...errors import user_error
from ...messages import describe, plural

_context: Any = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["torch", "torch.distributed", "torch._dynamo", __name__, "moe_dualpipe.training.from_options"]
)


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that failed on a rank: the message of the error, with its notes, on one line.

    invalid: whether it is a ValueError of this package, which reports invalid options.
    """

    rank: int
    message: str
    invalid: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.message}"


def run_tasks(
    num_ranks: int, function: Callable[[Any], Any], tasks: Sequence[Any], timeout: float = 300
) -> list[list[Any] | Failure]:
    """For each task, return the results of `function(task)` on all ranks, or the first failure.

    timeout: seconds per task. Raises ValueError if the task cannot be sent to another process.
    """
    results: list[list[Any] | Failure] = []
    while len(results) < len(tasks):
        results += _launch(num_ranks, function, tasks[len(results) :], timeout)
    return results


def _launch(
    num_ranks: int, function: Callable[[Any], Any], tasks: Sequence[Any], timeout: float
) -> list[list[Any] | Failure]:
    """The results of the tasks, up to and including the first failure."""
    queue = _context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(queue, f"{folder}/store", rank, num_ranks, function, tasks) for rank in range(num_ranks)]
        processes = [_context.Process(target=_main, args=args, daemon=True) for args in arguments]
        try:
            for process in processes:
                _start(process)
            return [*_collect(queue, processes, len(tasks), timeout)]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()


def _start(process: Any) -> None:
    try:
        process.start()
    except (AttributeError, TypeError, ValueError) as error:  # pickle raises any of these, and PicklingError
        what = "a class or function of the model cannot be sent to another process"
        raise ValueError(f"{what}: define it at the top level of a file ({describe(error)})") from None


def _collect(queue: Any, processes: list[Any], num_tasks: int, timeout: float) -> Any:
    for _ in range(num_tasks):
        values: dict[int, Any] = {}
        while len(values) < len(processes):
            if not _ready(queue, processes, timeout):
                yield _silent(processes, values, timeout)
                return
            rank, value, failure = queue.get()
            if failure is not None:
                yield failure
                return
            values[rank] = value
        yield [values[rank] for rank in range(len(processes))]


def _ready(queue: Any, processes: list[Any], timeout: float) -> bool:
    """Wait for a result. Returns False after the timeout, or if a process died."""
    waited = 0.0
    while not queue._reader.poll(0.5):
        waited += 0.5
        ended = any(process.exitcode is not None for process in processes)
        if waited >= timeout or (ended and not queue._reader.poll(1)):
            return False
    return True


def _silent(processes: list[Any], values: dict[int, Any], timeout: float) -> Failure:
    for rank, process in enumerate(processes):
        if process.exitcode is not None:
            return Failure(rank, f"the process ended with code {process.exitcode}")
    missing = next(rank for rank in range(len(processes)) if rank not in values)
    return Failure(missing, f"no result after {plural(round(timeout), 'second')}")


def _main(queue: Any, store: str, rank: int, num_ranks: int, function: Callable[[Any], Any], tasks: Any) -> None:
    torch.set_num_threads(1)  # the number of threads changes the order of sums
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        for task in tasks:
            queue.put((rank, function(task), None))
            dist.barrier()
    except (Exception, SystemExit) as error:
        queue.put((rank, None, _failure(rank, error)))
    finally:
        dist.destroy_process_group()


def _failure(rank: int, error: BaseException) -> Failure:
    if (line := user_error(error)) is not None:
        return Failure(rank, line)
    if isinstance(error, ValueError):
        return Failure(rank, describe(error), invalid=True)
    return Failure(rank, "; ".join([f"{type(error).__name__}: {describe(error)}", *getattr(error, "__notes__", [])]))
