"""What every expert-parallel backend does, and the values that pass through it.

A token travels once to each rank that holds any of its experts. `prepare` finds out who sends what to whom, `dispatch`
moves the tokens there, `combine` brings the results back and adds them up. There is no autograd inside: the backward of
dispatch is combine and the backward of combine is dispatch, on the same route.

T tokens on this rank, D model dim, K experts per token, N rows received, M choices of local experts, R ranks.
"""

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from moe_dualpipe.kernels.routing import ExpertOrder

V = TypeVar("V", covariant=True)


class Pending(Protocol[V]):
    """A result on its way. `wait` may be called again; it waits on the stream on CUDA, and blocks on CPU."""

    def wait(self) -> V: ...


@dataclass(frozen=True, slots=True)
class Ready(Generic[V]):
    """A result that is there already."""

    value: V

    def wait(self) -> V:
        return self.value


@dataclass(frozen=True, slots=True)
class Route:
    """Who sends what to whom, for one set of routing decisions; used by forward and backward alike.

    order: the expert-major order of the received rows over the local experts, which the expert MLP consumes.
    num_rows: N, the rows received. handle: whatever the backend needs besides.
    """

    order: ExpertOrder
    num_rows: int
    handle: Any = None


class Received(NamedTuple):
    """x_ND: the rows that arrived. weights_M: the routing weights of the local choices, in expert-major order."""

    x_ND: Tensor
    weights_M: Tensor | None


class Combined(NamedTuple):
    """y_TD: the sum, over ranks, of what came back for each token. weight_grads_TK: likewise, one per choice."""

    y_TD: Tensor
    weight_grads_TK: Tensor | None


class ExpertParallel(Protocol):
    """A backend. `num_experts` in total, of which this rank holds `local_experts`, a range of consecutive ids."""

    num_experts: int
    local_experts: range

    def prepare(self, expert_ids_TK: Tensor) -> Route: ...

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]: ...

    def combine(self, y_ND: Tensor, route: Route, weight_grads_M: Tensor | None = None) -> Pending[Combined]: ...
