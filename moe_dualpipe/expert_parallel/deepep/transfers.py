"""What the two interfaces of DeepEP have in common, as backend.py uses them.

All calls are asynchronous: they run on DeepEP's stream after the work that is queued on the current stream, and return
an event. Their results may be used once the event has been waited for.
"""

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(slots=True, eq=False)
class Plan:
    """State of a route. ids_TK: the expert ids that DeepEP gets. layout: what `prepare` returned.

    handle: DeepEP's handle; None before the first dispatch. arriving: the event of the first dispatch until the route's
    user has waited for it.
    """

    ids_TK: Tensor
    layout: Any
    handle: Any = None
    arriving: Any = None


@dataclass(frozen=True, slots=True)
class Sent:
    """Results of a first dispatch. ids_NK: local expert ids, -1 for others. num_choices: M, exactly."""

    x_ND: Tensor
    ids_NK: Tensor
    weights_NK: Tensor | None
    num_choices: int
    handle: Any
    event: Any


class Transfers(Protocol):
    """Calls of one interface. Rows are bfloat16, weights and their gradients float32, and all are contiguous.

    max_tokens: largest number of tokens of a rank; None: any number.
    """

    @property
    def max_tokens(self) -> int | None: ...

    def prepare(self, ids_TK: Tensor) -> Any: ...

    def dispatch(self, x_TD: Tensor, plan: Plan, weights_TK: Tensor | None) -> Sent: ...

    def dispatch_again(self, x_TD: Tensor, plan: Plan, weights_TK: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        """Returns x_ND, weights_NK and the event."""
        ...

    def combine(self, y_ND: Tensor, plan: Plan, grads_NK: Tensor | None) -> tuple[Tensor, Tensor | None, Any]:
        """Returns y_TD, grads_TK and the event."""
        ...
