"""Read the token ids of the next steps from a store before they are needed.

Batches are a function of the step, so it is known which windows of which files the next steps read. They are requested
several steps ahead, into memory (data/stores/remote_files.py). A step that does not find one waits, and is counted.
"""

from collections.abc import Iterable
from concurrent.futures import Future

from ..messages import plural
from .batches import TextData, TokenStream
from .given_batches import GivenBatches
from .stores import RemoteFile
from .token_files import TokensOnDisk

_MOST_STEPS, _MOST_BYTES = 32, 2**28


class ReadAhead:
    """The steps of a rank up to step `last`: `rows` of `count` sequences of `seq_len` tokens, as `TextData.batch`.

    ahead: the number of steps that are requested before they are needed.
    """

    def __init__(self, text: TextData | GivenBatches, seed: int, count: int, seq_len: int, rows: range, last: int):
        self.text, self.last, self._step = text, last, (seed, count, seq_len, rows)
        streams = [s for one in text.sources for s in (one.train, one.held_out)] if isinstance(text, TextData) else []
        found = {id(s.file): s.file for s in streams if isinstance(s, TokensOnDisk) and isinstance(s.file, RemoteFile)}
        self.files, self._requested, self._waits = [*found.values()], 0, 0
        size = max((s.dtype.itemsize for s in streams), default=1) * len(rows) * (seq_len + 1)
        self.ahead = max(1, min(_MOST_STEPS, _MOST_BYTES // max(size, 1))) if self.files else 0

    def fill(self, first: int) -> None:
        """Read the first steps, and wait for them. Raises ValueError if they cannot be read."""
        for future in [one for step in range(first, first + self.ahead) for one in self._request(step)]:
            future.result()
        self._requested = first + self.ahead
        self.take_waits()

    def advance(self, step: int) -> None:
        """Call before `step` reads its batch: requests the step that is `ahead` of it."""
        if self.files:
            for later in range(max(self._requested, step), step + self.ahead + 1):
                self._request(later)
            self._requested = max(self._requested, step + self.ahead + 1)

    def held_out(self, first: int, count: int, total: int) -> None:
        """Request sequences of the held-out text, as `TextData.held_out_batch` reads them."""
        if self.files and isinstance(self.text, TextData):
            request(self.text.held_out_windows(first, count, total, self._step[2]), self._step[2])

    def take_waits(self) -> int:
        """The reads since the last call that waited for the store."""
        waits = sum(file.waits for file in self.files)
        new, self._waits = waits - self._waits, waits
        return new

    def _request(self, step: int) -> list["Future[bytes]"]:
        if step >= self.last or not isinstance(self.text, TextData):
            return []
        seed, count, seq_len, rows = self._step
        return request(self.text.windows(seed, step, count, seq_len, rows), seq_len)

    def __str__(self) -> str:
        return f"data is read {plural(self.ahead, 'step')} ahead"


def request(windows: Iterable[tuple[TokenStream, int]], seq_len: int) -> list["Future[bytes]"]:
    """Start to read windows of streams, unless they are on this machine."""
    return [
        future
        for stream, start in windows
        if isinstance(stream, TokensOnDisk)
        for future in stream.read_ahead([(start, start + seq_len + 1)])
    ]
