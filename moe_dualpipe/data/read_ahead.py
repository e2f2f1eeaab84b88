"""Read the batches of the next steps from a store before they are needed.

Batches are a function of the step, so it is known which ones the next steps need. Threads read them some steps ahead,
into memory. A step that does not find its batch waits, and is counted.
"""

from concurrent.futures import Future
from typing import TYPE_CHECKING

from .batches import TextData
from .given_batches import GivenBatches
from .stores.threads import DaemonThreads
from .token_files import is_remote

if TYPE_CHECKING:
    from torch import Tensor

_MOST_STEPS, _MOST_BYTES = 32, 2**28
_threads = DaemonThreads(2)


class ReadAhead:
    """The batches of a rank up to step `last`: `rows` of `count` sequences of `seq_len` tokens, as `TextData.batch`.

    ahead: the number of steps that are read before they are needed; 0 unless some of the text is on a store.
    """

    def __init__(self, text: TextData | GivenBatches, seed: int, count: int, seq_len: int, rows: range, last: int):
        self.text, self.last, self._batch = text, last, (count, seq_len, rows)
        self._seed, self._waits, self._coming = seed, 0, dict[int, Future]()
        remote = isinstance(text, TextData) and any(is_remote(source.train) for source in text.sources)
        size = 2 * 8 * len(rows) * seq_len
        self.ahead = max(1, min(_MOST_STEPS, _MOST_BYTES // size)) if remote else 0

    def fill(self, first: int) -> None:
        """Read the first steps, and wait for them. Raises ValueError if they cannot be read."""
        if self.ahead:
            self._request(first)
        for future in self._coming.values():
            future.result()

    def batch(self, step: int) -> "tuple[Tensor, Tensor]":
        """The batch of a step. Starts to read those of the steps after it."""
        if not self.ahead:
            return self._read(step)
        self._request(step)
        coming = self._coming.pop(step)
        self._waits += not coming.done()
        return coming.result()

    def take_waits(self) -> int:
        """The steps since the last call that waited for the store."""
        waits, self._waits = self._waits, 0
        return waits

    def _read(self, step: int) -> "tuple[Tensor, Tensor]":
        return self.text.batch(self._seed, step, *self._batch)

    def _request(self, first: int) -> None:
        for step in range(first, min(first + self.ahead + 1, max(self.last, first + 1))):
            if step not in self._coming:
                self._coming[step] = _threads.submit(self._read, step)
