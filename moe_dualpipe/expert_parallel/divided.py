"""What the backends have in common: experts that are divided evenly over ranks, and what a run asks a backend.

A backend is chosen by what its class says of itself: whether ranks can use it (`fault`), and whether its transfers go
on while the process computes (`in_background`).
"""

from collections.abc import Sequence
from typing import ClassVar

from ..kernels.backend import Kernels, validate_kernels
from .protocol import ExpertParallel
from .rank_facts import RankFacts


class DividedExperts(ExpertParallel):
    """Experts that are divided evenly over `num_ranks` ranks, in order. This is rank `rank`.

    kernels: the implementation that gathers and sums rows (kernels/backend.py).
    Raises ValueError if the experts cannot be divided evenly, or if the kernels are not available.
    """

    in_background: ClassVar[bool] = True
    """Whether transfers go on while this process computes, so that overlap can hide them."""
    remote_bytes: int = 0
    """Bytes of rows that this rank has sent to other machines since the last `take_remote_bytes`."""

    def __init__(self, num_experts: int, num_ranks: int, rank: int, kernels: Kernels = "auto"):
        self.kernels: Kernels = validate_kernels(kernels)
        if num_ranks < 1 or num_experts % num_ranks:
            raise ValueError(f"{num_experts} experts cannot be divided evenly over {num_ranks} ranks")
        self.num_experts, self.num_ranks, self.rank = num_experts, num_ranks, rank
        self.experts_per_rank = num_experts // num_ranks
        self.local_experts = range(rank * self.experts_per_rank, (rank + 1) * self.experts_per_rank)

    @classmethod
    def fault(cls, facts: Sequence[RankFacts]) -> str:  # noqa: ARG003 - for subclasses
        """Why ranks with these facts cannot use this backend; "" if they can."""
        return ""

    def check(self) -> None:
        """Raise the error of a transfer that failed on a GPU. Call it after its results have been read."""

    def take_remote_bytes(self) -> int:
        taken, self.remote_bytes = self.remote_bytes, 0
        return taken
