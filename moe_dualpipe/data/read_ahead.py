"""Read the token ids of the next steps from a store before they are needed.

Batches are a function of the step, so it is known which windows of which files the next steps read. Their blocks are
requested several steps ahead, into the cache of the files (data/stores/blocks.py). A step then finds them on the local
disk. One that does not waits, and is counted.
"""

from collections.abc import Iterable
from concurrent.futures import Future

from ..messages import plural
from .batches import TextData, TokenStream
from .given_batches import GivenBatches
from .stores import BLOCK, RemoteFile, StorageError
from .token_files import TokensOnDisk

_MOST_STEPS = 32
_SHARE = 16
"""The blocks read ahead by a rank take at most this part of the cache: other ranks use it, too."""


class ReadAhead:
    """The steps of a rank up to step `last`: `rows` of `count` sequences of `seq_len` tokens, as `TextData.batch`.

    ahead: the number of steps that are requested before they are needed. Raises
    ValueError if the cache cannot hold the blocks of two steps.
    """

    def __init__(self, text: TextData | GivenBatches, seed: int, count: int, seq_len: int, rows: range, last: int):
        self.text, self.last, self._step = text, last, (seed, count, seq_len, rows)
        streams = [s for one in text.sources for s in (one.train, one.held_out)] if isinstance(text, TextData) else []
        found = {id(s.file): s.file for s in streams if isinstance(s, TokensOnDisk) and isinstance(s.file, RemoteFile)}
        self.files, self._requested, self._waits = [*found.values()], 0, 0
        if not self.files:
            self.ahead = 0
            return
        size = max(s.dtype.itemsize for s in streams if isinstance(s, TokensOnDisk)) * (seq_len + 1)
        limit, needed = self.files[0].cache.limit, len(rows) * (size // BLOCK + 2) * BLOCK
        if limit < 2 * needed:
            least = f"use {2 * needed / 1e9:.2g} or more"
            raise ValueError(f"data_cache_gb {limit / 1e9:g} cannot hold the blocks of two steps: {least}")
        self.ahead = max(1, min(_MOST_STEPS, limit // _SHARE // needed))

    def fill(self, first: int) -> None:
        """Read the blocks of the first steps, and wait for them. Raises ValueError if they cannot be read."""
        try:
            for future in [one for step in range(first, first + self.ahead) for one in self._request(step)]:
                future.result()
        except StorageError as error:
            raise ValueError(str(error)) from None
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
