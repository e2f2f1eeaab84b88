"""Raise the error of one rank on all ranks.

A rank that raises alone leaves the others waiting in the next collective operation. Its message may also get lost,
because only the first rank of a machine prints invalid options.
"""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

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
    """Return `build()`. Raises ValueError on all ranks if `build` raises it on any rank. Collective."""
    built: list[Result] = []
    fault = ""
    try:
        built.append(build())
    except ValueError as error:
        fault = str(error) or type(error).__name__
    raise_on_all_ranks(fault)
    return built[0]
