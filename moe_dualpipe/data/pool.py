"""Call a function in worker processes. They end when this process ends, even if it is killed.

Workers are new programs (`spawn`), because a fork would inherit the threads of the tokenizer library and of torch. Each
asks the kernel of Linux for a signal when the thread that has started it ends.
"""

import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

T = TypeVar("T")
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
_function: list[Callable[[Any], Any]] = []
"""What this worker calls."""


def run_in_processes(function: Callable[[Any], T], items: Sequence[Any], workers: int) -> Iterator[T]:
    """Yield the result for each item, in order. An error is raised when its turn comes, and ends all workers.

    With one worker or one item, this process calls the function. If there are more workers than items, each may use
    several threads of the tokenizer library. Raises ChildProcessError if a worker is killed.
    """
    processes = min(workers, len(items))
    if processes <= 1:
        yield from map(function, items)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, _start, (function, workers // processes, os.getpid()))
    try:
        yield from pool.map(_call, items)
    except BrokenProcessPool:
        raise ChildProcessError("a worker process was killed; if memory is short, use fewer --workers") from None
    except BaseException:
        for process in [*pool._processes.values()]:  # in the middle of an item
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _start(function: Callable[[Any], Any], threads: int, parent: int) -> None:
    _function.append(function)  # sent once: a tokenizer takes long to build
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process, too, which ends this one
    os.environ |= {"TOKENIZERS_PARALLELISM": str(threads > 1).lower(), "RAYON_NUM_THREADS": str(threads)}
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _call(item: Any) -> Any:
    return _function[0](item)
