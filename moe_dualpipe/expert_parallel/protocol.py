"""The interface of an expert-parallel backend, and the values that it takes and returns.

A token is sent once to each rank that holds any of its experts. `prepare` starts to exchange the sizes, `dispatch`
sends the tokens, and `combine` sends the results back and sums them. Backends record no autograd graph: the backward of
dispatch is combine, and the backward of combine is dispatch, with the same route.

T tokens on this rank, D model dim, K experts per token, N received rows, M choices of local experts, R ranks.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.order import ExpertOrder
from ..kernels.routing import expert_order

V = TypeVar("V", covariant=True)


class Pending(Protocol[V]):
    """A result of an asynchronous operation. `wait` is a stream wait on CUDA and blocks on CPU; it may be repeated."""

    def wait(self) -> V: ...


@dataclass(frozen=True, slots=True)
class Completed(Generic[V]):
    """A result that is available immediately."""

    completed: ClassVar[bool] = True
    value: V

    def wait(self) -> V:
        return self.value


@dataclass(slots=True, eq=False)
class Route:
    """Which rows go to which ranks, for one set of routing decisions. Forward and backward use the same route.

    num_local_experts: number of experts on this rank. kernels: the implementation that sorts rows (kernels/backend.py).
    local_ids_NK: local expert ids of each received row, -1 for experts on other ranks and for choices of no expert.
    None once `order` has been computed.
    num_rows, num_choices: N and M. These three are known once the first dispatch has been waited for.
    exact: M is the number of local choices. Otherwise M may be larger: a GPU would have to wait for an exact count.
    padded: N may be larger than the number of received rows. The other rows follow them, have no experts, and may be
    NaN.
    backend_state: private data of the backend. rows_per_token: K for a route of `ByChoice`, which sends K rows.
    """

    num_local_experts: int
    kernels: Kernels = "auto"
    local_ids_NK: Tensor | None = None
    num_rows: int = 0
    num_choices: int = 0
    exact: bool = True
    padded: bool = False
    backend_state: Any = None
    rows_per_token: int = 1
    _order: ExpertOrder | None = field(default=None, repr=False)

    @property
    def order(self) -> ExpertOrder:
        """The received rows sorted by local expert, the input order of the expert MLP. Computed on first use."""
        if self._order is None:
            if self.local_ids_NK is None:
                raise RuntimeError("the order of a route is not known yet: wait for its first dispatch")
            self._order = expert_order(
                self.local_ids_NK, self.num_local_experts, self.num_choices, self.kernels, check_ids=False
            )
            self.local_ids_NK = None  # a view of the received message, whose memory can now be reused
        return self._order


class Received(NamedTuple):
    """x_ND: received rows. weights_NK: routing weights of their choices; None if dispatch sent no weights.

    Use only the weights of choices of local experts, as `Route.order` does. Others may be there too, or be anything:
    their ranks apply them, and `combine` sums over ranks, so they would count twice.
    """

    x_ND: Tensor
    weights_NK: Tensor | None


class Combined(NamedTuple):
    """y_TD: results of each token, summed over ranks. weight_grads_TK: gradients of routing weights, if sent."""

    y_TD: Tensor
    weight_grads_TK: Tensor | None


class ExpertParallel(Protocol):
    """A backend for `num_experts` experts. This rank holds `local_experts`, a range of consecutive ids.

    Expert ids are global. Id -1 means no expert: the weight of this choice is not used, and its gradient is zero. A
    token whose choices are all -1 is not sent, and its combined result is zero. `prepare` raises ValueError for other
    ids out of range, except on a GPU.
    The first call with a route must be `dispatch`. Then `dispatch` and `combine` may be called any number of times.
    Inputs must not be modified until the returned result has been waited for.
    """

    num_experts: int
    local_experts: range

    def prepare(self, expert_ids_TK: Tensor) -> Route: ...

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]: ...

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]: ...
