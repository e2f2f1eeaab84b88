"""One rank of many in a single process: the other ranks are virtual and the link to them is modelled.

All ranks are assumed to send the same rows. So the rows that this rank sends to rank r are also the rows that it
receives from rank r, with their experts mapped to the local ones. One process does the work of one rank of R, and its
communication takes the time of a modelled link. One GPU or CPU can thus measure the overlap of a job of 64 ranks.

The result is that of a model with the same experts on all ranks: expert e of rank r equals expert e of rank 0.
"""

from collections.abc import Mapping
from functools import partial

from torch import Tensor

from ...kernels.backend import Kernels
from ...overlap import streams
from ...overlap.labels import BACKWARD, COMBINE, DISPATCH, FORWARD, label
from ..exchange import AsyncResult, Exchange, receive_buffer, start_copy_to_host
from ..protocol import Combined, Completed, Pending, Received, Route
from .link import Link, LinkTimer


class Loopback(Exchange):
    """Rank 0 of `num_ranks` virtual ranks over `link`. Rows that it sends to itself take no time.

    On CUDA, rows are copied at the speed of the link (paced_copy.py). `bytes_sent` counts the rows sent to other ranks.
    Raises ValueError if the experts cannot be divided evenly, or if the kernels are not available.
    """

    def __init__(self, num_experts: int, num_ranks: int, link: Link | None = None, kernels: Kernels = "auto"):
        super().__init__(num_experts, num_ranks, 0, kernels)
        self.link = link or Link()
        self.timer = LinkTimer()
        self.bytes_sent = 0

    def all_to_all_counts(self, counts_R2: Tensor) -> Pending[Tensor]:
        counts_2R2 = self._transfer(counts_R2.expand(2, *counts_R2.shape), self.link.seconds(0))
        if (device_streams := streams.streams_of(counts_R2.device)) is None:
            return counts_2R2
        return AsyncResult([], start_copy_to_host(counts_2R2.wait(), device_streams))

    def all_to_all(self, rows: Tensor, rows_out: list[int], rows_in: list[int]) -> Pending[Tensor]:
        num_bytes = (len(rows) - rows_out[0]) * rows.shape[1] * rows.element_size()
        self.bytes_sent += num_bytes
        return self._transfer(rows, self.link.seconds(num_bytes))

    def _transfer(self, rows: Tensor, seconds: float) -> Pending[Tensor]:
        device_streams = streams.streams_of(rows.device)
        if device_streams is None:
            return AsyncResult([self.timer.transfer(seconds)], lambda: rows)
        from .paced_copy import paced_copy  # imports triton, which a CPU does not need

        target = receive_buffer(rows, len(rows))
        copy = partial(paced_copy, rows, target, seconds, self.link.sms)
        return Completed(self.timer.copy(device_streams.current_stream(rows.device), copy))


class Replay(Loopback):
    """Loopback whose transfers take the durations measured in another job, regardless of their size.

    sms: as in Link. seconds: the duration of each kind of transfer:

        "dispatch(F)"   dispatch with routing weights         "combine(F)"   combine without their gradients
        "combine(B)"    dispatch without routing weights      "dispatch(B)"  combine with their gradients
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
