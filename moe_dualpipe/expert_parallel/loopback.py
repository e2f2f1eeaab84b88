"""Many ranks in one process: this one is real, the others do what it does, and the link between them is modelled.

What this rank sends to rank r is what rank r, in the same situation, sends to it: the rows come back as if received,
their experts folded onto the local ones. So one process holds the experts and does the work of one rank of R, and its
communication takes the time of a modelled link. It is how one GPU, or one CPU, measures the overlap of a job of 64.

As a function it is a model whose experts are the same on all ranks: expert e of rank r is expert e of rank 0.
"""

from torch import Tensor

from .exchange import Exchange, Later
from .link import Link, Wire


class Loopback(Exchange):
    """Rank 0 of `num_ranks` virtual ranks over `link`; rows to itself do not travel.

    Raises ValueError when the experts cannot be divided evenly.
    """

    def __init__(self, num_experts: int, num_ranks: int, link: Link | None = None):
        super().__init__(num_experts, num_ranks, rank=0)
        self.link = link or Link()
        self.wire = Wire()

    def swap_counts(self, counts_R2: Tensor) -> Later[Tensor]:
        counts = counts_R2.cpu()
        return Later([self.wire.carry(self.link.seconds(0))], lambda: counts.expand(2, *counts.shape))

    def swap(self, rows: Tensor, rows_out: list[int], rows_in: list[int]) -> Later[Tensor]:
        travelling = (len(rows) - rows_out[0]) * rows.shape[1] * rows.element_size()
        return Later([self.wire.carry(self.link.seconds(travelling))], lambda: rows)
