"""Run a function that may never return, and say what it was doing.

A collective operation, a disk or the rendezvous store may keep a thread waiting in C++ or in the kernel. So the
function runs in a thread of its own, announces each step, and is given up when a step takes too long.
"""

import re
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Generic, TypeVar

from ...data.stores.threads import call_in_thread
from ...messages import printable

Result = TypeVar("Result")
_TICK = 0.02


class Steps:
    """What a thread is doing, and since when."""

    def __init__(self) -> None:
        self.name, self.waits, self.since = "starting", False, time.monotonic()

    def start(self, name: str, waits: bool = False) -> None:
        """Begin a step. waits: it only waits for other ranks, so that a timeout is their failure."""
        self.name, self.waits, self.since = name, waits, time.monotonic()


@dataclass(frozen=True, slots=True)
class Ended(Generic[Result]):
    """How a function ended: with a value, or with a failure such as "rank 1 -> rank 3: no answer for 60 s".

    waited: the step that failed only waited for other ranks.
    """

    value: Result | None = None
    failure: str = ""
    waited: bool = False


def run_watched(
    function: Callable[[Steps], Result], seconds: float, stop: Callable[[], bool] = lambda: False, every: float = 1.0
) -> Ended[Result]:
    """Run `function(steps)` in a thread. Never waits for a step longer than `seconds`.

    stop: called `every` second; if it returns True, the function is given up as well. A function that is given up keeps
    its thread: end the process with os._exit.
    """
    steps = Steps()
    result, asked = call_in_thread(lambda: function(steps), "watched"), time.monotonic()
    while not futures.wait([result], _TICK).done:
        now = time.monotonic()
        if now - steps.since > seconds:
            return Ended(failure=f"{steps.name}: no answer for {seconds:g} s", waited=steps.waits)
        if now - asked > every:
            asked = now
            if stop():
                return Ended(failure=f"{steps.name}: given up, as another rank failed", waited=True)
    if error := result.exception():
        return Ended(failure=f"{steps.name}: {_first_line(error)}", waited=steps.waits)
    return Ended(result.result())


def _first_line(error: BaseException) -> str:
    """The reason, without the place in gloo's source, its advice, and the C++ stack trace below torch's first line."""
    lines = str(error).strip().splitlines()
    reason = re.sub(r"^\[\S+:\d+\] |\. This is typically .*", "", lines[0]) if lines else ""
    return printable(reason, 300) or type(error).__name__
