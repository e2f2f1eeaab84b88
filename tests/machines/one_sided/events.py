"""What programs of the kernels of one-sided transfers do to memory that other programs use, as data.

The programs of a launch run concurrently.
"""

from typing import NamedTuple


class HazardError(Exception):
    """The kernels deadlock, or access memory that others may be accessing."""


class Access(NamedTuple):
    """A load or store by all threads of a program. cells: numbers of the words."""

    store: bool
    cells: tuple[int, ...]


class Barrier(NamedTuple):
    """All threads of a program wait for each other. line: in the source."""

    line: str


class Atomic(NamedTuple):
    """A load of a word or an exchange, by one thread. wanted: a wait until the word is at least this."""

    line: str
    word: int
    exchange: bool
    operand: int
    sem: str
    scope: str
    wanted: int | None = None


Event = Access | Barrier | Atomic


class Launch(NamedTuple):
    """A kernel on one rank. message: number of the transfer. programs: what each of them does, in order."""

    kernel: str
    message: int
    programs: tuple[list[Event], ...]


class Recording(NamedTuple):
    """The launches of each stream, in order, and the names of cells and words. The first streams are those of ranks.

    Cells from `private` on are each accessed by one rank only. The other ones contain messages.
    """

    ranks: list[list[Launch]]
    cells: list[str]
    words: list[str]
    private: int
