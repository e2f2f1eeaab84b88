"""A backend that takes longer: for tests, and to see what a slower network would do to a real one."""

from typing import TypeVar

from torch import Tensor

from ..exchange import AsyncResult
from ..protocol import Combined, ExpertParallel, Pending, Received, Route
from .link import Link, LinkTimer

V = TypeVar("V")


class Delayed:
    """`backend`, with the time of a modelled link added beside it: a transfer is there when both say so.

    The link carries [T, D] and [N, D] as they are given, one after another. Raises ValueError for CUDA tensors.
    """

    def __init__(self, backend: ExpertParallel, link: Link):
        self.backend, self.link, self.timer = backend, link, LinkTimer()
        self.num_experts, self.local_experts = backend.num_experts, backend.local_experts

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        return self.backend.prepare(expert_ids_TK)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        return self._delay(self.backend.dispatch(x_TD, route, weights_TK), x_TD)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        return self._delay(self.backend.combine(y_ND, route, weight_grads_NK), y_ND)

    def _delay(self, pending: Pending[V], rows: Tensor) -> Pending[V]:
        if rows.is_cuda:
            raise ValueError("Delayed models time on a CPU thread: it cannot delay CUDA tensors")
        return AsyncResult([self.timer.transfer(self.link.seconds(rows.nbytes))], pending.wait)
