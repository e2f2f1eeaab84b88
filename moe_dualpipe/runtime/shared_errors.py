"""Raise the error of one rank on all ranks.

A rank that raises alone leaves the others waiting in the next collective operation. Its message may also get lost,
because only the first rank of a machine prints invalid options.
"""

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from ..errors import user_error
from ..expert_parallel.gather import first_fault, gather_objects

Result = TypeVar("Result")


def raise_on_all_ranks(fault: str) -> None:
    """Raise ValueError on all ranks if any rank passes a message; "" means no fault. Collective."""
    if first := first_fault(fault):
        raise ValueError(first)


@contextmanager
def errors_on_all_ranks(
    group: dist.ProcessGroup | None = None, before_waiting: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """If any rank raises an error in this context, raise it on all ranks when all have left it. Collective.

    With several ranks, raises a ValueError or OSError that says which ranks failed, and why. before_waiting: called
    before this rank waits for the others.
    """
    failed: Exception | None = None
    try:
        yield
    except Exception as error:
        failed = error
    before_waiting()
    mine = None if failed is None else (str(failed) or type(failed).__name__, isinstance(failed, ValueError))
    outcomes = gather_objects(mine, group)
    if failed and len(outcomes) == 1:
        raise failed
    failures = {rank: outcome for rank, outcome in enumerate(outcomes) if outcome}
    if not failures:
        return
    text, is_invalid = next(iter(failures.values()))
    if len(failures) == len(outcomes) and len({*failures.values()}) == 1:
        message = f"all ranks: {text}"
    else:
        message = "; ".join(f"rank {rank}: {text}" for rank, (text, _) in failures.items())
    raise ValueError(message) if is_invalid else OSError(message)


def build_on_all_ranks(build: Callable[[], Result]) -> Result:
    """Return `build()`. Raises ValueError on all ranks if on any rank `build` raises it, or a user's code fails.

    The error's cause has the text of the first such rank's traceback. Collective.
    """
    built: list[Result] = []
    fault = RankError("", "")
    try:
        built.append(build())
    except Exception as error:
        line = user_error(error) or (isinstance(error, ValueError) and (str(error) or type(error).__name__))
        if not line:
            raise
        fault = RankError(line, "".join(traceback.format_exception(error)))
    if faults := [fault for fault in gather_objects(fault) if fault.line]:
        raise ValueError(faults[0].line) from faults[0]
    return built[0]


class RankError(Exception):
    """An error of some rank, as text: a traceback cannot be sent."""

    def __init__(self, line: str, traceback: str):
        super().__init__(line, traceback)
        self.line, self.traceback = line, traceback

    def __str__(self) -> str:
        return f"\n\n{self.traceback}"
