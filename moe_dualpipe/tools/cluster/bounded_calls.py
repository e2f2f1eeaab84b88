"""Run a function that may never return, and say what it was doing.

A collective operation, a disk or the rendezvous store may keep a thread waiting in C++ or in the kernel. So the
function runs in a thread of its own, announces each step, and is given up when a step takes too long.
"""

import re
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

from ...data.stores.threads import call_in_thread
from ...messages import printable


class Steps:
    """What a thread is doing, and since when."""

    def __init__(self) -> None:
        self.start("starting")

    def start(self, name: str) -> None:
        self.name, self.since = name, time.monotonic()


def run_watched(function: Callable[[Steps], Any], seconds: float) -> tuple[Any, str]:
    """Run `function(steps)` in a thread. Returns its value, or a failure: "rank 1 -> rank 3: no answer for 60 s".

    Never waits for a step longer than `seconds`. The thread of a function that is given up goes on: end the process
    with os._exit.
    """
    steps = Steps()
    result = call_in_thread(lambda: function(steps), "watched")
    while not futures.wait([result], 0.02).done:
        if time.monotonic() - steps.since > seconds:
            return None, f"{steps.name}: no answer for {seconds:g} s"
    if error := result.exception():
        return None, f"{steps.name}: {_first_line(error)}"
    return result.result(), ""


def _first_line(error: BaseException) -> str:
    """The reason, without the place in gloo's source, its advice, and the C++ stack trace below torch's first line."""
    lines = str(error).strip().splitlines()
    reason = re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", lines[0]) if lines else ""
    return printable(reason, 300) or type(error).__name__
