"""The backend of one rank: every expert is here, nothing travels."""

from torch import Tensor

from moe_dualpipe.kernels.routing import expert_order

from .protocol import Combined, Ready, Received, Route


class Local:
    """Expert parallelism over one rank: the rows received are the tokens themselves."""

    def __init__(self, num_experts: int):
        self.num_experts = num_experts
        self.local_experts = range(num_experts)

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        return Route(expert_order(expert_ids_TK, self.num_experts), expert_ids_TK.shape[0])

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Ready[Received]:
        weights_M = None if weights_TK is None else weights_TK.flatten()[route.order.choice_idx_M]
        return Ready(Received(x_TD, weights_M))

    def combine(self, y_ND: Tensor, route: Route, weight_grads_M: Tensor | None = None) -> Ready[Combined]:
        return Ready(Combined(y_ND, None if weight_grads_M is None else to_choices(weight_grads_M, route)))


def to_choices(values_M: Tensor, route: Route) -> Tensor:
    """[M] values in expert-major order -> [N, K], zero for the choices that are not local."""
    positions_NK = route.order.positions_NK
    values_NK = values_M.new_zeros(positions_NK.shape)
    values_NK.view(-1)[route.order.choice_idx_M] = values_M
    return values_NK
