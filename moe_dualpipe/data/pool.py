"""Call a function in worker processes. They end when this process ends, even if it is killed.

Workers are new programs (`spawn`), because a fork would inherit the threads of the tokenizer library and of torch.
"""

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from multiprocessing.connection import Connection
from typing import Any, TypeVar

T = TypeVar("T")


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
    theirs, ours = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(processes, context, _start, (workers // processes, theirs))
    try:
        yield from pool.map(partial(_call, pickle.dumps(function)), items)
    except BrokenProcessPool:
        raise ChildProcessError("a worker process was killed; if memory is short, use fewer --workers") from None
    except BaseException:
        ours.close()  # ends the workers in the middle of what they do
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        ours.close()


def _start(threads: int, parent: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the first process, too, which ends this one
    os.environ |= {"TOKENIZERS_PARALLELISM": str(threads > 1).lower(), "RAYON_NUM_THREADS": str(threads)}
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: Connection) -> None:
    parent.poll(None)  # until the other end closes
    os._exit(1)


def _call(function: bytes, item: Any) -> Any:
    return _unpickled(function)(item)


@lru_cache(maxsize=1)
def _unpickled(function: bytes) -> Callable[[Any], Any]:
    """A worker unpickles its function once: a tokenizer takes long to build."""
    return pickle.loads(function)
