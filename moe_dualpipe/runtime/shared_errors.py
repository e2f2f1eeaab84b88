"""Raise the error of one rank on all ranks.

A rank that raises alone leaves the others waiting in the next collective operation. Its message may also get lost,
because only the first rank of a machine prints invalid options.
"""

import traceback
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ..errors import user_error

Result = TypeVar("Result")


def gather_objects(mine: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Return the `mine` of every rank of `group`, or [mine] if torch.distributed is not initialized."""
    gathered = [mine]
    if dist.is_initialized():
        gathered *= dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group)
    return gathered


def raise_on_all_ranks(fault: str) -> None:
    """Raise ValueError on all ranks if any rank passes a message; "" means no fault. Collective."""
    if faults := [fault for fault in gather_objects(fault) if fault]:
        raise ValueError(faults[0])


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
