"""Run a function on several ranks, in real processes with real torch.distributed (gloo), and collect the results.

Processes are forked from a server that has already imported torch, so a launch takes a fraction of a second. If a rank
fails, the test fails with the traceback of that rank. Ranks that do not finish in time are killed.
"""

import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context: Any = multiprocessing.get_context("forkserver")
# What a run imports: every rank would import it again, which takes seconds. The first optimizer imports torch._dynamo.
_PRELOAD = [
    "pytest", "torch._dynamo", "tests.support.ranks", "tests.support.runs", "moe_dualpipe.tools.planner.run_prediction",
    "moe_dualpipe.tools.checks.nonfinite", "moe_dualpipe.tools.profiler.profiled_steps",
]  # fmt: skip
_context.set_forkserver_preload(_PRELOAD)
os.register_at_fork(after_in_child=gc.freeze)  # or each process would go through, and copy, all objects of the server


@contextmanager
def started(target: Callable[..., Any], arguments: Sequence[tuple]) -> Iterator[list[Any]]:
    """Processes of `target(*arguments[rank])`, one for each rank. What still runs at the end is killed."""
    processes = [_context.Process(target=target, args=args, daemon=True) for args in arguments]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextmanager
def _started_ranks(num_ranks: int, function: Callable[..., Any], args: tuple) -> Iterator[tuple[list[Any], Any]]:
    """Ranks of one process group that call `function(rank, *args)`, and the queue of their (rank, value, error)."""
    results = _context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(results, f"{folder}/store", rank, num_ranks, function, args) for rank in range(num_ranks)]
        with started(_main, arguments) as processes:
            yield processes, results


def run_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 120) -> list[Any]:
    """Return `[function(rank, *args) for rank in range(num_ranks)]`, each computed in its own process."""
    values: dict[int, Any] = {}
    with _started_ranks(num_ranks, function, args) as (_, results):
        while len(values) < num_ranks:
            missing = {*range(num_ranks)} - values.keys()
            assert results._reader.poll(timeout), f"ranks {missing} did not finish within {timeout} s"
            rank, values[rank], error = results.get()
            assert error is None, f"rank {rank} failed:\n{error}"
    return [values[rank] for rank in range(num_ranks)]


def each(rank: int, function: Callable[..., Any], items: Sequence, *args: Any) -> list[Any]:
    """For `run_ranks`: `function(rank, item, *args)` for one item after the other."""
    return [function(rank, item, *args) for item in items]


def run_failing_ranks(num_ranks: int, function: Callable[..., Any], *args: Any, timeout: float = 60) -> list[str]:
    """Return the traceback of `function` on each rank; "" for a rank that died without a traceback.

    The test fails if a rank finishes without an error or does not end in time.
    """
    ended = dict.fromkeys(range(num_ranks), "")
    with _started_ranks(num_ranks, function, args) as (processes, results):
        for rank, process in enumerate(processes):
            process.join(timeout)
            assert process.exitcode is not None, f"rank {rank} did not end within {timeout} s"
        while not results.empty():
            rank, _, error = results.get()
            assert error is not None, f"rank {rank} finished without an error"
            ended[rank] = error
    return [ended[rank] for rank in range(num_ranks)]


def exits_and_logs(
    target: Callable[..., Any], arguments: Sequence[tuple], logs: Sequence[Path],
    meanwhile: Callable[[list], Any] = lambda _: None, timeout: float = 60,
) -> tuple[list[int | None], list[str]]:  # fmt: skip
    """Run `target(*arguments[rank])` in a process for each rank. Returns their exit codes, and what is in their logs.

    meanwhile: called with the processes when they have started. timeout: seconds to wait for each of them.
    """
    with started(target, arguments) as processes:
        meanwhile(processes)
        for process in processes:
            process.join(timeout)
        return [process.exitcode for process in processes], [log.read_text() for log in logs]


def _main(results: Any, store: str, rank: int, num_ranks: int, function: Callable[..., Any], args: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks)
        value = function(rank, *args)
        if dist.is_initialized():  # `function` may have left the world
            dist.barrier()
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def cosine_distance(x: torch.Tensor, y: torch.Tensor) -> float:
    """1 - 2xy / (xx + yy), in double; zero for two zero tensors."""
    x, y = x.double(), y.double()
    norms = (x * x + y * y).sum().item()
    return 1 - 2 * (x * y).sum().item() / norms if norms else 0.0
