"""Threads that end with the process, whatever they wait for: a store may never answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


def call_in_thread(function: Callable[[], Result], name: str) -> "Future[Result]":
    """Call `function` in a thread of its own, so that the caller can give up on it, and receives signals."""
    result: Future[Result] = Future()
    threading.Thread(target=_settle, args=(result, function), daemon=True, name=name).start()
    return result


class DaemonThreads:
    """Like ThreadPoolExecutor, which would wait for its threads at the end of the process."""

    def __init__(self, count: int):
        self._left, self._queue = count, SimpleQueue()

    def submit(self, function: Callable[..., Result], *arguments: Any) -> "Future[Result]":
        result: Future[Result] = Future()
        self._queue.put((result, lambda: function(*arguments)))
        if self._left > 0:
            self._left -= 1
            threading.Thread(target=self._work, daemon=True).start()
        return result

    def _work(self) -> None:
        while True:
            _settle(*self._queue.get())


def _settle(result: "Future[Result]", function: Callable[[], Result]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
