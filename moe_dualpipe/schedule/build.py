"""Build a schedule by name. An error for invalid numbers suggests valid ones."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from ..messages import plural, unknown_name
from .actions import Action
from .baselines import (
    chimera,
    gpipe,
    interleaved_one_f_one_b,
    interleaved_overlap,
    one_f_one_b,
    one_f_one_b_overlap,
    zb1p,
    zbv,
)
from .dualpipe import dualpipe, dualpipev
from .placement import Placement
from .schedule import Schedule


@dataclass(frozen=True, slots=True)
class _Method:
    """How to build one schedule. `actions` yields the actions of a rank."""

    placement: Callable[..., Placement]
    actions: Callable[..., Iterator[Action]]
    min_micro_batches_per_rank: int = 1
    even: bool = False  # the numbers of ranks and of micro-batches must be even: two flows, mirrored ranks
    in_groups: bool = False  # the number of micro-batches must be a multiple of the number of ranks
    default_chunks: int | None = None  # if set, `placement` and `actions` take the number of chunks as well
    with_one_chunk: str = ""  # the schedule that is its case of one chunk


_METHODS = {
    "gpipe": _Method(Placement.straight, gpipe),
    "1f1b": _Method(Placement.straight, one_f_one_b),
    "interleaved_1f1b": _Method(
        Placement.interleaved, interleaved_one_f_one_b, in_groups=True, default_chunks=2, with_one_chunk="1f1b"
    ),
    "1f1b_overlap": _Method(Placement.straight, one_f_one_b_overlap),
    "interleaved_overlap": _Method(
        Placement.interleaved, interleaved_overlap, in_groups=True, default_chunks=2, with_one_chunk="1f1b_overlap"
    ),
    "zb1p": _Method(Placement.straight, zb1p),
    "zbv": _Method(Placement.vee, zbv),
    "chimera": _Method(Placement.mirrored, chimera, even=True),
    "dualpipe": _Method(Placement.mirrored, dualpipe, min_micro_batches_per_rank=2, even=True),
    "dualpipev": _Method(Placement.vee, dualpipev, min_micro_batches_per_rank=2),
}
NAMES = tuple(_METHODS)
MOST_CHUNKS = 2**19  # larger schedules take minutes to build and simulate
_ALIASES = {"vpp": "interleaved_1f1b", "pipedream-flush": "1f1b", "zb-h1": "zb1p", "zero-bubble": "zb1p"}


def placement_of(name: str, num_ranks: int, num_chunks: int | None = None) -> Placement:
    """Return the placement of schedule `name` on `num_ranks` ranks. Raises ValueError as `build` does."""
    if name not in _METHODS:
        raise unknown_name("schedule", name, NAMES, _ALIASES)
    if num_ranks < 1:
        raise ValueError(f"{name} needs at least one pipeline rank: got {num_ranks}; use 1 or more")
    chunks = _chunks(name, num_chunks)
    check_chunks(1, num_ranks * max(chunks, default=1))
    if _METHODS[name].even and num_ranks % 2:
        raise ValueError(
            f"{name} needs an even number of pipeline ranks: got {num_ranks}; "
            f"use {num_ranks + 1}, or dualpipev, which takes any number"
        )
    return _METHODS[name].placement(num_ranks, *chunks)


def check_numbers(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> int:
    """Return the number of stages of the schedule that `build` would build. Raises ValueError as `build` does."""
    placement = placement_of(name, num_ranks, num_chunks)
    check_micro_batches(name, num_ranks, num_micro_batches)
    check_chunks(num_micro_batches, placement.num_stages)
    return placement.num_stages


def check_micro_batches(name: str, num_ranks: int, num_micro_batches: int) -> None:
    """Raise ValueError, with the nearest number that works, for micro-batches that schedule `name` cannot run."""
    method = _METHODS[name]
    multiple = num_ranks if method.in_groups else 2 if method.even else 1
    least = method.min_micro_batches_per_rank * num_ranks
    if num_micro_batches < least or num_micro_batches % multiple:
        kind = "an even number of" if method.even else "a number of"
        times = f"{method.min_micro_batches_per_rank} x " if method.min_micro_batches_per_rank > 1 else ""
        which = "that is a multiple of the ranks" if method.in_groups else f">= {times}ranks"
        use = max(least, num_micro_batches + -num_micro_batches % multiple)
        fewer = f" (interleaved_overlap needs {num_ranks})" if least > num_ranks else ""
        raise ValueError(
            f"{name} needs {kind} micro-batches {which}: "
            f"got {num_micro_batches} for {plural(num_ranks, 'rank')}{fewer}; use {use}"
        )


@lru_cache(maxsize=32)
def build(name: str, num_ranks: int, num_micro_batches: int, num_chunks: int | None = None) -> Schedule:
    """Build the schedule `name` (one of NAMES) for one step.

    num_ranks: number of pipeline ranks. It must be even for chimera and dualpipe.
    num_micro_batches: micro-batches per step. At least `num_ranks`, and 2 x `num_ranks` for dualpipe and dualpipev;
        even for chimera and dualpipe; a multiple of `num_ranks` for interleaved_1f1b and interleaved_overlap.
    num_chunks: stages per rank, at least 2. Only for these two. None: 2.

    Raises ValueError for an unknown name, and for invalid numbers. The message suggests the nearest valid ones.
    """
    check_numbers(name, num_ranks, num_micro_batches, num_chunks)
    placement, method = placement_of(name, num_ranks, num_chunks), _METHODS[name]
    numbers = (num_ranks, num_micro_batches, *_chunks(name, num_chunks))
    actions = tuple(tuple(method.actions(rank, *numbers)) for rank in range(num_ranks))
    return Schedule(name, placement, num_micro_batches, actions)


def check_chunks(num_micro_batches: int, num_stages: int) -> None:
    """Raise ValueError for a schedule that is too large to build."""
    if num_micro_batches * num_stages > MOST_CHUNKS:
        raise ValueError(
            f"a schedule can have at most {MOST_CHUNKS:,} chunks, one for each micro-batch and stage: got "
            f"{plural(num_micro_batches, 'micro-batch', 'es')} on {plural(num_stages, 'stage')}; use fewer"
        )


def takes_chunks(name: str) -> bool:
    """Whether `build` takes a number of chunks for this schedule."""
    return name in _METHODS and _METHODS[name].default_chunks is not None


def _chunks(name: str, num_chunks: int | None) -> tuple[int, ...]:
    """Return the number of chunks as a tuple of one, or () for a schedule without chunks."""
    default = _METHODS[name].default_chunks
    if default is None and num_chunks is not None:
        others = ", ".join(other for other in NAMES if takes_chunks(other))
        raise ValueError(f"{name} does not take a number of chunks: got {num_chunks}; use it with {others}")
    if num_chunks is not None and num_chunks < 2:
        one = _METHODS[name].with_one_chunk
        raise ValueError(f"{name} needs at least 2 chunks per rank: got {num_chunks}; use 2, or {one}, which has one")
    chunks = default if num_chunks is None else num_chunks
    return () if chunks is None else (chunks,)


def default_micro_batches(num_ranks: int) -> int:
    """Return the smallest number of micro-batches, at least 8, for any schedule that can run on `num_ranks` ranks."""
    return -(-max(8, 2 * num_ranks) // num_ranks) * num_ranks


def default_schedule(num_ranks: int, ep: int) -> str:
    """Return the name of the schedule `auto` for `num_ranks` pipeline ranks, with experts over `ep` ranks.

    One rank that has all experts communicates with no other during a micro-batch, so there is nothing to overlap.
    """
    if num_ranks == ep == 1:
        return "1f1b"
    return "dualpipev" if num_ranks % 2 else "dualpipe"
