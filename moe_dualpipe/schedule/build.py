"""`build(name, ...)`: every schedule by its name, or an error that says which numbers would do."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from .actions import Action
from .baselines import one_f_one_b
from .dualpipe import dualpipe, dualpipev
from .placement import Placement
from .schedule import Schedule


@dataclass(frozen=True, slots=True)
class _Method:
    placement: Callable[[int], Placement]
    actions: Callable[[int, int], tuple[tuple[Action, ...], ...]]
    min_micro_batches_per_rank: int = 1
    even: bool = False  # ranks and micro-batches come in mirrored pairs


_METHODS = {
    "1f1b": _Method(Placement.straight, one_f_one_b),
    "dualpipe": _Method(Placement.mirrored, dualpipe, min_micro_batches_per_rank=2, even=True),
    "dualpipev": _Method(Placement.vee, dualpipev, min_micro_batches_per_rank=2),
}
NAMES = tuple(_METHODS)


def placement_of(name: str, num_ranks: int) -> Placement:
    """The placement that schedule `name` uses on `num_ranks` ranks. Raises ValueError as `build` does."""
    method = _METHODS.get(name)
    if method is None:
        near = difflib.get_close_matches(name, NAMES, n=1, cutoff=0.0)[0]
        raise ValueError(f"unknown schedule {name!r}; did you mean {near!r}? There are: {', '.join(NAMES)}")
    if num_ranks < 1:
        raise ValueError(f"{name} needs at least one pipeline rank: got {num_ranks}")
    if method.even and num_ranks % 2:
        raise ValueError(
            f"{name} needs an even number of pipeline ranks: got {num_ranks}; "
            f"use {num_ranks + 1}, or dualpipev, which runs on any number"
        )
    return method.placement(num_ranks)


@lru_cache(maxsize=32)
def build(name: str, num_ranks: int, num_micro_batches: int) -> Schedule:
    """Build the schedule `name` (one of NAMES) for one step of `num_micro_batches` over `num_ranks` pipeline ranks.

    Raises ValueError, with the numbers and the nearest ones that would do, for an unknown name, an odd number where
    mirrored pairs are needed, and too few micro-batches to fill the pipeline.
    """
    where = placement_of(name, num_ranks)
    method = _METHODS[name]
    least = method.min_micro_batches_per_rank * num_ranks
    if num_micro_batches < least or (method.even and num_micro_batches % 2):
        even = "an even number of" if method.even else "a number of"
        times = f"{method.min_micro_batches_per_rank} x " if method.min_micro_batches_per_rank > 1 else ""
        use = max(least, num_micro_batches + num_micro_batches % 2 if method.even else num_micro_batches)
        raise ValueError(
            f"{name} needs {even} micro-batches >= {times}ranks: "
            f"got {num_micro_batches} for {num_ranks} ranks; use {use}"
        )
    return Schedule(name, where, num_micro_batches, method.actions(num_ranks, num_micro_batches))
