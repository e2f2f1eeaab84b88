"""Sums that do not depend on which rank holds which expert: each choice of a token returns by itself.

A rank that holds several experts of a token adds up their outputs and returns one row. So the order of the sum depends
on where the experts are: (a + b) + c differs in the last bit from (a + c) + b. This wrapper of any backend treats each
choice as a separate row, and adds the returned rows in the order of the token's choices. Then an expert that moves to
another rank changes no bit. It sends K rows per token, instead of one for each rank with any of the token's experts.

T tokens, D model dim, K experts per token, N received rows.
"""

from torch import Tensor

from .divided import WrappedBackend
from .exchange import AsyncResult
from .protocol import Combined, Pending, Received, Route


class ByChoice(WrappedBackend):
    """The expert parallelism of `backend`, whose capacity, if it has one, must be for K rows per token."""

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        route = self.backend.prepare(expert_ids_TK.reshape(-1, 1))
        route.rows_per_token = expert_ids_TK.shape[1]
        return route

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        rows = x_TD.repeat_interleave(route.rows_per_token, 0)
        return self.backend.dispatch(rows, route, None if weights_TK is None else weights_TK.reshape(-1, 1))

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        pending = self.backend.combine(y_ND, route, weight_grads_NK)

        def finish() -> Combined:
            rows, grads = pending.wait()
            y_TKD, k = rows.unflatten(0, (-1, route.rows_per_token)), route.rows_per_token
            return Combined(y_TKD.sum(1), None if grads is None else grads.view(-1, k))

        return AsyncResult([pending], finish)
