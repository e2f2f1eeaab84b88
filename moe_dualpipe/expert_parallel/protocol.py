"""What every expert-parallel backend does, and the values that pass through it.

A token travels once to each rank that holds any of its experts. `prepare` finds out who sends what to whom, `dispatch`
moves the tokens there, `combine` brings the results back and adds them up. There is no autograd inside: the backward of
dispatch is combine and the backward of combine is dispatch, on the same route.

T tokens on this rank, D model dim, K experts per token, N rows received, M choices of local experts, R ranks.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.routing import ExpertOrder, expert_order

V = TypeVar("V", covariant=True)


class Pending(Protocol[V]):
    """A result on its way. `wait` may be called again; it waits on the stream on CUDA, and blocks on CPU."""

    def wait(self) -> V: ...


@dataclass(frozen=True, slots=True)
class Completed(Generic[V]):
    """A result that is there already."""

    completed: ClassVar[bool] = True
    value: V

    def wait(self) -> V:
        return self.value


@dataclass(slots=True, eq=False)
class Route:
    """Who sends what to whom, for one set of routing decisions; used by forward and backward alike.

    num_local_experts: E_local. kernels: what sorts the rows (kernels/backend.py). local_ids_NK: for each row received,
    its choices among this rank's experts, -1 for those that live elsewhere. num_rows, num_choices: N and M. These are
    known once the first dispatch has been waited for.
    backend_state: whatever the backend needs besides.
    """

    num_local_experts: int
    kernels: Kernels = "auto"
    local_ids_NK: Tensor | None = None
    num_rows: int = 0
    num_choices: int = 0
    backend_state: Any = None
    _order: ExpertOrder | None = field(default=None, repr=False)

    @property
    def order(self) -> ExpertOrder:
        """The expert-major order of the received rows over the local experts, which the expert MLP consumes."""
        if self._order is None:
            if self.local_ids_NK is None:
                raise RuntimeError("this route has no order yet: wait for its first dispatch")
            self._order = expert_order(
                self.local_ids_NK, self.num_local_experts, self.num_choices, self.kernels, check_ids=False
            )
            self.local_ids_NK = self.local_ids_NK.clone()  # they came in one message with the rows, which may go now
        return self._order


class Received(NamedTuple):
    """x_ND: the rows that arrived. weights_NK: the routing weights of their choices, where asked for."""

    x_ND: Tensor
    weights_NK: Tensor | None


class Combined(NamedTuple):
    """y_TD: the sum, over ranks, of what came back for each token. weight_grads_TK: likewise, one per choice."""

    y_TD: Tensor
    weight_grads_TK: Tensor | None


class ExpertParallel(Protocol):
    """A backend. `num_experts` in total, of which this rank holds `local_experts`, a range of consecutive ids.

    `dispatch` and `combine` may be called any number of times on a route, the first time with dispatch. Inputs must not
    change until what they returned has been waited for.
    """

    num_experts: int
    local_experts: range

    def prepare(self, expert_ids_TK: Tensor) -> Route: ...

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]: ...

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]: ...
