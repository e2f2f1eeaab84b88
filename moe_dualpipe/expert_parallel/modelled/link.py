"""A link that is only modelled: what it carries takes the time that bandwidth and latency ask for, one after another.

On a CPU that time passes on a thread, which sleeps, so that it costs no processor. A profiler that records all threads
sees each transfer as "link:carry", and where it was asked for as "link::carry".
"""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import Any

from torch.profiler import record_function

from ...overlap.labels import LINK_CALL, LINK_TRANSFER


@dataclass(frozen=True, slots=True)
class Link:
    """One rank's link. gb_per_s: 1e9 bytes a second, in each direction. latency_us: for each message, whatever its
    size. sms: the streaming multiprocessors that communication takes from the computation, on CUDA.

    Raises ValueError for numbers that no link has.
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
        return self.latency_us * 1e-6 + num_bytes / (self.gb_per_s * 1e9)


class LinkTimer:
    """The time of a link passing, transfer after transfer. `busy` is the total so far, in seconds."""

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self._thread: ThreadPoolExecutor | None = None
        self._free_at = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_thread": None}  # so that a model can be copied

    def transfer(self, seconds: float) -> "ModelledTransfer":
        """A transfer that starts now, or when those before it are through."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="link")
        with record_function(LINK_CALL):
            self.busy_seconds += seconds
            self._free_at = max(self._free_at, time.perf_counter()) + seconds
            return ModelledTransfer(self._thread.submit(_sleep_until, self._free_at))


@dataclass(frozen=True, slots=True)
class ModelledTransfer:
    """`wait` blocks until a transfer is through."""

    future: "Future[None]"

    def wait(self) -> None:
        self.future.result()


def _sleep_until(moment: float) -> None:
    with record_function(LINK_TRANSFER):
        while (left := moment - time.perf_counter()) > 0:
            time.sleep(left)
