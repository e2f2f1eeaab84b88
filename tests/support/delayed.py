"""A wrapper that delays the transfers of a backend, as a slower network would."""

from typing import TypeVar

from torch import Tensor

from moe_dualpipe.expert_parallel import Combined, ExpertParallel, Link, Pending, Received, Route
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.expert_parallel.modeled.link import LinkTimer

V = TypeVar("V")


class Delayed:
    """`backend` with a modeled link. A transfer ends when both the backend and the link have completed it.

    The link transfers the bytes of the input, [T, D] or [N, D], one transfer after another.
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
        return AsyncResult([self.timer.transfer(self.link.seconds(rows.nbytes))], pending.wait)
