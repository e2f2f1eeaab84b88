"""The backend for a single rank that holds all experts. Nothing is sent."""

from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.routing import count_choices
from .divided import DividedExperts
from .protocol import Combined, Completed, Received, Route


class Local(DividedExperts):
    """Expert parallelism over one rank: the received rows are the tokens themselves.

    Raises ValueError if the kernels (kernels/backend.py) are not available.
    """

    in_background = False

    def __init__(self, num_experts: int, kernels: Kernels = "auto"):
        super().__init__(num_experts, 1, 0, kernels)

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        counted = count_choices(expert_ids_TK, self.num_experts)
        num_choices = expert_ids_TK.numel() if counted is None else counted
        rows = len(expert_ids_TK)
        return Route(self.num_experts, self.kernels, expert_ids_TK, rows, num_choices, exact=counted is not None)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Completed[Received]:
        return Completed(Received(x_TD, weights_TK))

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Completed[Combined]:
        return Completed(Combined(y_ND, weight_grads_NK))
