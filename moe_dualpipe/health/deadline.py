"""End the process when a call does not return, even if it waits in C++.

The rendezvous store answers a `get` or a `check` over TCP. When its machine is cut off or frozen, no packet says so:
the client waits forever, whatever timeout it was given. So another thread counts the seconds, and calls nothing that
can block.
"""

import threading

from .program import program_name
from .report import end_process

_CHECKS = 20


class Deadline:
    """Inside this context, `renew` must be called every `seconds`; otherwise the process ends.

    It then prints one line, "train.py: <text>", and exits with code 1. Time is counted in checks, 20 in `seconds`, so
    the time during which a machine was suspended does not count.
    """

    def __init__(self, seconds: float, text: str):
        self.text = text
        self._interval, self._checks, self._over = seconds / _CHECKS, 0, threading.Event()
        self._thread = threading.Thread(target=self._count, name="deadline", daemon=True)

    def renew(self) -> None:
        """Restart the count, from any thread."""
        self._checks = 0

    def __enter__(self) -> "Deadline":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()  # at once: it never waits for anything else

    def _count(self) -> None:
        while not self._over.wait(self._interval):
            self._checks += 1
            if self._checks > _CHECKS:
                end_process(1, f"{program_name()}: {self.text}\n")
