"""Ranks that share the experts of a model, each with sequences of its own: what they agree on.

A dispatch needs all ranks. So they run the same number of forwards, divided into micro-batches in the same way. A rank
without sequences left runs empty forwards.

Two micro-batches hide each other's dispatch and combine. That pays if transfers go on while a rank computes, and if
some rank has two sequences. Otherwise there is one micro-batch, whose products are larger.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch.distributed as dist

from ..expert_parallel.gather import gather_objects

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class ExpertRanks:
    """The ranks of `group`; None: all ranks of torch.distributed. alone: only this one.

    in_background: there are transfers, and they go on while this process computes (`DividedExperts.in_background`).
    """

    in_background: bool
    group: dist.ProcessGroup | None = None
    alone: bool = False

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group) if dist.is_initialized() and not self.alone else 1

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group) if self.size > 1 else 0

    def micro_batches(self, sequences: int) -> int:
        """The number of micro-batches that take turns. sequences: those of the rank with the most."""
        return 2 if self.in_background and sequences >= 2 else 1

    def most(self, number: int) -> int:
        """The largest number of any rank. Collective."""
        return max(self.gather(number))  # not all_reduce: a group may have NCCL alone, which takes no numbers of a CPU

    def gather(self, mine: Value) -> list[Value]:
        """The values of all ranks. Collective."""
        return gather_objects(mine, self.group) if self.size > 1 else [mine]


ALONE = ExpertRanks(in_background=False, alone=True)
