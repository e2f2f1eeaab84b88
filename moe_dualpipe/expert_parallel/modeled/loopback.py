"""One rank of many in a single process: the other ranks are virtual and the link to them is modeled.

All ranks are assumed to send the same rows. So the rows that this rank sends to rank r are also the rows that it
receives from rank r, with their experts mapped to the local ones. One process does the work of one rank of R, and its
communication takes the time of a modeled link. One GPU or CPU can thus measure the overlap of a job of 64 ranks.

The result is that of a model with the same experts on all ranks: expert e of rank r equals expert e of rank 0.

On a CPU, a transfer is a sleeping thread. On a GPU, the kernels of Symmetric move the rows at the pace of the link
(windows.py), and the host waits for nothing.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...kernels.backend import Kernels
from ...overlap import streams
from ...overlap.labels import BACKWARD, FORWARD, label
from ..exchange import AsyncResult, Exchange, buffer_rows
from ..labels import COMBINE, DISPATCH
from ..protocol import Combined, Pending, Received, Route
from .link import Link, LinkTimer

if TYPE_CHECKING:
    from .windows import LoopbackWindows


class Loopback(Exchange):
    """Rank 0 of `num_ranks` virtual ranks over `link`. Rows that it sends to itself take no time.

    link: None: one that takes no time.
    On a GPU, rows are in bfloat16, float16 or float32, and multiples of 16 bytes, and routing weights are in float32.
    Operations raise ValueError for other rows, and RuntimeError for more than two transfers in flight there.
    Raises ValueError if the experts cannot be divided evenly, or if the kernels are not available.
    """

    def __init__(self, num_experts: int, num_ranks: int, link: Link | None = None, kernels: Kernels = "auto"):
        super().__init__(num_experts, num_ranks, 0, kernels)
        self.link = link or Link()
        self.timer = LinkTimer()
        self._bytes_sent = 0
        self._windows: LoopbackWindows | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Models are copied; windows contain addresses.
        return self.__dict__ | {"_windows": None, "_bytes_sent": self.bytes_sent}

    @property
    def bytes_sent(self) -> int:
        """Bytes of the rows sent to other ranks so far. On a GPU, reading it waits for the transfers."""
        return self._bytes_sent + (0 if self._windows is None else int(self._windows.sent))

    # ---- on a GPU ----

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        if streams.streams_of(expert_ids_TK.device) is None:
            return super().prepare(expert_ids_TK)
        from ..symmetric.one_sided import plan_route

        return plan_route(expert_ids_TK, self.num_experts, self.num_ranks, self.kernels)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        if streams.streams_of(x_TD.device) is None:
            return super().dispatch(x_TD, route, weights_TK)
        return self._windows_for(x_TD, route).dispatch(x_TD, route, weights_TK)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        if streams.streams_of(y_ND.device) is None:
            return super().combine(y_ND, route, weight_grads_NK)
        return self._windows_for(y_ND, route).combine(y_ND, route, weight_grads_NK)

    def _windows_for(self, rows: Tensor, route: Route) -> "LoopbackWindows":
        """Windows for these rows. They belong to the GPU of the first transfer."""
        from .windows import LoopbackWindows

        plan, found = route.backend_state, self._windows
        tokens, row_bytes = max(len(plan.slots_TC), 1), rows.shape[1] * rows.element_size()
        if found is None or not found.fits(tokens, row_bytes, plan.top_k):
            sizes = (0, 0, 0) if found is None else (found.max_tokens, found.max_row, found.top_k)
            max_tokens, max_row, top_k = map(max, sizes, (buffer_rows(tokens), row_bytes, plan.top_k))
            sent = torch.zeros((), dtype=torch.int64, device=rows.device) if found is None else found.sent
            found = self._windows = LoopbackWindows(
                self.num_experts, self.num_ranks, self.kernels, sent, max_tokens=max_tokens, row_bytes=max_row,
                top_k=top_k, previous=found,
            )  # fmt: skip
        found.paced.link = self.link
        return found

    # ---- on a CPU ----

    def all_to_all_counts(self, counts_R2: Tensor) -> Pending[Tensor]:
        return self.transfer(counts_R2.expand(2, *counts_R2.shape), 0)

    def all_to_all(self, rows: Tensor, rows_out: list[int], rows_in: list[int]) -> Pending[Tensor]:
        return self.transfer(rows, (len(rows) - rows_out[0]) * rows.shape[1] * rows.element_size())

    def transfer(self, rows: Tensor, num_bytes: int) -> Pending[Tensor]:
        """Receive `rows` after the time that the link takes for `num_bytes`."""
        self._bytes_sent += num_bytes
        return AsyncResult([self.timer.transfer(self.link.seconds(num_bytes))], lambda: rows)


class Replay(Loopback):
    """Loopback whose transfers take the durations measured in another job, regardless of their size.

    On a GPU, these are the times in which rows are written; copying or summing the received rows takes longer.

    sms: as in Link. seconds: the duration of each kind of transfer:

        "dispatch(F)"   dispatch with routing weights         "combine(F)"   combine without their gradients
        "combine(B)"    dispatch without routing weights      "dispatch(B)"  combine with their gradients

    In backward the roles change: the backward of a combine is a dispatch, and that of a dispatch is a combine.
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
        self._set_duration(label(COMBINE, BACKWARD) if weights_TK is None else label(DISPATCH, FORWARD))
        return super().dispatch(x_TD, route, weights_TK)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        self._set_duration(label(COMBINE, FORWARD) if weight_grads_NK is None else label(DISPATCH, BACKWARD))
        return super().combine(y_ND, route, weight_grads_NK)

    def _set_duration(self, kind: str) -> None:
        self.link = Link(latency_us=1e6 * self.seconds[kind], sms=self.sms)
