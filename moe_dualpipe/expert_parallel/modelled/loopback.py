"""Many ranks in one process: this one is real, the others do what it does, and the link between them is modelled.

What this rank sends to rank r is what rank r, in the same situation, sends to it: the rows come back as if received,
their experts folded onto the local ones. So one process holds the experts and does the work of one rank of R, and its
communication takes the time of a modelled link. It is how one GPU, or one CPU, measures the overlap of a job of 64.

As a function it is a model whose experts are the same on all ranks: expert e of rank r is expert e of rank 0.
"""

from collections.abc import Mapping

from torch import Tensor

from ...kernels.backend import Kernels
from ...overlap.labels import BACKWARD, COMBINE, DISPATCH, FORWARD, label
from ..exchange import AsyncResult, Exchange, start_copy_to_host
from ..protocol import Combined, Completed, Pending, Received, Route
from .link import Link, LinkTimer


class Loopback(Exchange):
    """Rank 0 of `num_ranks` virtual ranks over `link`; rows to itself do not travel. On CUDA rows are copied, slowly.

    Raises ValueError when the experts cannot be divided evenly, or the kernels cannot be had.
    """

    def __init__(self, num_experts: int, num_ranks: int, link: Link | None = None, kernels: Kernels = "auto"):
        super().__init__(num_experts, num_ranks, 0, kernels)
        self.link = link or Link()
        self.timer = LinkTimer()
        self.bytes_sent = 0
        """What has been sent to other ranks so far, without the counts."""

    def all_to_all_counts(self, counts_R2: Tensor) -> Pending[Tensor]:
        counts_2R2 = self._transfer(counts_R2.expand(2, *counts_R2.shape), self.link.seconds(0))
        return AsyncResult([], start_copy_to_host(counts_2R2.wait())) if counts_R2.is_cuda else counts_2R2

    def all_to_all(self, rows: Tensor, rows_out: list[int], rows_in: list[int]) -> Pending[Tensor]:
        travelling = (len(rows) - rows_out[0]) * rows.shape[1] * rows.element_size()
        self.bytes_sent += travelling
        return self._transfer(rows, self.link.seconds(travelling))

    def _transfer(self, rows: Tensor, seconds: float) -> Pending[Tensor]:
        if not rows.is_cuda:
            return AsyncResult([self.timer.transfer(seconds)], lambda: rows)
        from .paced_copy import paced_copy  # Triton, which a CPU does without

        return Completed(paced_copy(rows, seconds, self.link.sms))


class Replay(Loopback):
    """Loopback whose transfers take the times of another job, whatever they carry.

    seconds: by kind of transfer, "dispatch(F)", "combine(F)", "dispatch(B)", "combine(B)"; they are told apart by the
    routing weights, which travel with a dispatch and whose gradients come back with its backward, a combine. sms: as
    of a Link.
    """

    def __init__(
        self, num_experts: int, num_ranks: int, seconds: Mapping[str, float], sms: int, kernels: Kernels = "auto"
    ):
        super().__init__(num_experts, num_ranks, kernels=kernels)
        self.seconds, self.sms = dict(seconds), sms

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        self.link = Link(sms=self.sms)
        return super().prepare(expert_ids_TK)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        self._set_transfer_time(label(COMBINE, BACKWARD) if weights_TK is None else label(DISPATCH, FORWARD))
        return super().dispatch(x_TD, route, weights_TK)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        self._set_transfer_time(label(COMBINE, FORWARD) if weight_grads_NK is None else label(DISPATCH, BACKWARD))
        return super().combine(y_ND, route, weight_grads_NK)

    def _set_transfer_time(self, kind: str) -> None:
        self.link = Link(latency_us=1e6 * self.seconds[kind], sms=self.sms)
