"""Gather or add up a small value of every rank. Without torch.distributed, this process is the only rank."""

from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


def gather_objects(mine: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Return the `mine` of every rank of `group`, or [mine] if torch.distributed is not initialized."""
    gathered = [mine]
    if dist.is_initialized():
        gathered *= dist.get_world_size(group)
        dist.all_gather_object(gathered, mine, group)
    return gathered


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Replace `tensor` by its sum over all ranks, and return it."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor)
    return tensor


def first_fault(mine: str, group: dist.ProcessGroup | None = None) -> str:
    """The first message of any rank that is not empty; "" if there is none. Collective."""
    return next(filter(None, gather_objects(mine, group)), "")
