"""A modeled link: transfers take the time given by bandwidth and latency, one after another.

On a CPU, a transfer is a sleeping thread, which uses no processor time. In a profile of all threads, it is labeled
LINK_TRANSFER, the call that starts it LINK_CALL, and a wait for it LINK_WAIT (overlap/labels.py).
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from torch.profiler import record_function

from ...overlap.annotation import annotation
from ...overlap.labels import LINK_CALL, LINK_TRANSFER, LINK_WAIT, with_group
from ..exchange import AsyncResult


@dataclass(frozen=True, slots=True)
class Link:
    """The link of one rank. Raises ValueError for invalid numbers.

    gb_per_s: bandwidth in each direction, in 1e9 bytes per second. latency_us: latency of a message, in microseconds.
    sms: number of multiprocessors that communication occupies on CUDA.
    """

    gb_per_s: float = inf
    latency_us: float = 0.0
    sms: int = 20

    def __post_init__(self) -> None:
        if not self.gb_per_s > 0:
            raise ValueError(f"a link needs a positive bandwidth: got {self.gb_per_s} GB/s")
        if not 0 <= self.latency_us < inf:
            raise ValueError(f"a link needs a latency of at least 0: got {self.latency_us} us")
        if self.sms < 1:
            raise ValueError(f"a link needs at least 1 SM: got {self.sms}")

    def seconds(self, num_bytes: int) -> float:
        """Duration of a transfer."""
        return self.latency_us * 1e-6 + num_bytes / (self.gb_per_s * 1e9)


class LinkTimer:
    """Runs the transfers of a link one after another. `busy_seconds` is their total duration so far.

    now, sleep: as in `time`, in seconds. `sleep` runs in the thread of the link.
    """

    def __init__(
        self, now: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self.busy_seconds = 0.0
        self._now, self._sleep = now, sleep
        self._thread: ThreadPoolExecutor | None = None
        self._free_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_thread": None}  # models are copied; threads cannot be

    def transfer(self, seconds: float, group: str = "") -> AsyncResult[None]:
        """Start a transfer of this duration. It begins when all earlier transfers have ended.

        group: the name of its group of ranks, for profiles.
        """
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="link")
        with record_function(with_group(LINK_CALL, group)):
            self.busy_seconds += seconds
            self._free_at = max(self._free_at, self._now()) + seconds
            done = self._thread.submit(self._sleep_until, self._free_at, with_group(LINK_TRANSFER, group))
        return AsyncResult([], partial(_wait, done))

    def _sleep_until(self, moment: float, text: str) -> None:
        with record_function(text):
            while (left := moment - self._now()) > 0:
                self._sleep(left)


def _wait(done: Future[None]) -> None:
    with annotation(LINK_WAIT):
        done.result()
