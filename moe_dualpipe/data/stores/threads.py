"""Threads that end with the process, whatever they wait for: a store may never answer."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


def call_in_thread(function: Callable[[], Result], name: str) -> "Future[Result]":
    """Call `function` in a daemon thread, so that the caller can stop waiting, and receives signals."""
    result: Future[Result] = Future()
    threading.Thread(target=_settle, args=(result, function), daemon=True, name=name).start()
    return result


def _settle(result: "Future[Result]", function: Callable[[], Result]) -> None:
    try:
        result.set_result(function())
    except BaseException as error:
        result.set_exception(error)
