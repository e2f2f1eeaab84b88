"""How far `prepare_data` is: a bar on the terminal, and the speed at the end."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Progress:
    """Counts of a call of `prepare_data`, which fills them in.

    show: draw a bar on standard error if that is a terminal.
    tokens, seconds: encoded by this call, and the time that it took. duplicates: documents left out.
    parts_before, parts_done, parts: those that an earlier call had finished, all that are finished, and all.
    """

    def __init__(self, show: bool = False):
        self._show = show
        self.tokens = self.duplicates = self.parts_before = self.parts_done = self.parts = 0
        self.seconds = self._start = 0.0

    @property
    def tokens_per_second(self) -> float:
        seconds = self.seconds or time.monotonic() - self._start
        return self.tokens / max(seconds, 1e-9)

    @contextmanager
    def bar(self, what: str, total: int, done: int = 0) -> Iterator[tqdm]:
        """Show a bar of `total` bytes, of which `done` are done, and measure the time."""
        self._start, self.seconds = time.monotonic(), 0.0
        hidden = None if self._show else True
        with tqdm(desc=what, total=total, initial=done, unit="B", unit_scale=True, disable=hidden, leave=False) as bar:
            yield bar
        self.seconds = time.monotonic() - self._start
