"""Helpers that several benchmarks share: quartiles for tables, and clean-up after a signal."""

import signal
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP


def quartiles(values: list[float], form: str) -> tuple[str, str]:
    """Format the median, and the range from the first quartile to the third: ("5", "4 to 7")."""
    low, middle, high = statistics.quantiles(values, method="inclusive")
    return f"{middle:{form}}", f"{low:{form}} to {high:{form}}"


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Turn signals into SystemExit, so that clean-up code runs."""
    before = [signal.signal(number, _exit) for number in SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)


def _exit(number: int, _frame: object) -> None:
    ignore_signals()
    sys.exit(128 + number)


def ignore_signals() -> None:
    """Ignore signals until `exit_on_signals` ends, so that they cannot interrupt the clean-up."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
