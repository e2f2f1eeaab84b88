"""Call what may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def call_in_thread(function: Callable[[], Result], name: str) -> "Future[Result]":
    """Call `function` in a thread that ends with the process, so that the caller can give up on it."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return result
