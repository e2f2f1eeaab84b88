"""The backend for CPU ranks of one machine: each rank writes rows into memory that the receiver maps.

    prepare   computes which rows go where; nothing is sent
    dispatch  writes the rows for each rank into a free slot, and tells that rank their number
    combine   sends back one row per received row; the source sums them over ranks

The sender knows the sizes and the receiver learns them with the data, so there is no exchange of sizes beforehand. Each
sender has several slots for each receiver. It waits only if all of them are full, and the receiver frees a slot as soon
as it has copied the rows. A message that is too large for its slot gets a larger one.
"""

import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch import Tensor

from ...kernels.backend import Kernels, validate_kernels
from ...kernels.permute import gather, gather_sum
from ...overlap.annotation import annotation
from ...overlap.labels import SHARED
from ..exchange import AsyncResult
from ..protocol import Combined, Pending, Received, Route
from ..sends import count_sends
from .mailbox import Mailbox, Notice
from .memory import Segment, create_file, field_bytes

V = TypeVar("V")
SLOTS = 4
"""Transfers in flight: two per lane of an overlapped pair."""
FREED, DISPATCH, COMBINE = range(3)
_OPERATIONS = "", "dispatch", "combine"


@dataclass(frozen=True, slots=True)
class _Plan:
    """State of a route. sent_S, slots_TC, ids_SK: as in exchange.py and sends.py.

    rows_out, choices_out: to each rank. rows_in: from each rank, known when the first dispatch has been waited for.
    """

    sent_S: Tensor
    slots_TC: Tensor
    rows_out: list[int]
    choices_out: list[int]
    ids_SK: Tensor | None
    rows_in: list[int] | None = None


@dataclass(slots=True)
class _Link:
    """The memory shared with one peer: the slots that this rank writes, those of them that are free, those it reads.

    arrived: the notices of operations that have not been waited for, by number.
    """

    written: dict[int, Segment] = field(default_factory=dict)
    free: list[int] = field(default_factory=lambda: [*range(SLOTS)])
    read: dict[int, Segment] = field(default_factory=dict)
    arrived: dict[int, Notice] = field(default_factory=dict)


class _Part(NamedTuple):
    """One field of the message to one rank: the rows `index` of `rows`; None: all rows."""

    rows: Tensor
    index: Tensor | None

    def write(self, out: Tensor, kernels: Kernels) -> None:
        out.copy_(self.rows) if self.index is None else gather(self.rows, self.index, out, kernels)


class Shared:
    """Experts are divided evenly over the ranks of `group`, in order. All ranks are on one machine, with CPU tensors.

    Every rank must call the same operations in the same order, with at most SLOTS transfers in flight. timeout: seconds
    that a rank waits for another one. Creating the backend is collective.

    Raises ValueError if the experts cannot be divided evenly, or if the kernels are not available. Operations raise
    RuntimeError if the ranks call different ones, and DistError, a RuntimeError, if a rank ends or does not answer.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup, kernels: Kernels = "auto", timeout: float = 600.0):
        self.kernels: Kernels = validate_kernels(kernels)
        self.num_ranks, self.rank = group.size(), group.rank()
        if num_experts % self.num_ranks:
            raise ValueError(f"{num_experts} experts cannot be divided evenly over {self.num_ranks} ranks")
        self.num_experts, self.experts_per_rank = num_experts, num_experts // self.num_ranks
        self.local_experts = range(self.rank * self.experts_per_rank, (self.rank + 1) * self.experts_per_rank)
        # Each rank starts with the next one, so that not all write to rank 0 first.
        self._links = {(self.rank + i) % self.num_ranks: _Link() for i in range(1, self.num_ranks)}
        self._number = self._in_flight = 0
        self._mailbox = Mailbox(group, timeout, self._on_notice)

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        counts_R2, finder = count_sends(expert_ids_TK, self.num_experts, self.num_ranks, self.kernels)
        tokens_M, ids_MK, slots_TC = finder.find()
        rows_out, choices_out = counts_R2.T.tolist()
        sent = sum(rows_out)
        plan = _Plan(tokens_M[:sent], slots_TC, rows_out, choices_out, ids_MK[:sent])
        return Route(self.experts_per_rank, self.kernels, backend_state=plan)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        plan: _Plan = route.backend_state
        ids_SK = plan.ids_SK
        fields = [x_TD.detach()] if weights_TK is None else [x_TD.detach(), weights_TK.detach()]
        index_R = plan.sent_S.split(plan.rows_out)
        parts = [[_Part(one, index) for one in fields] for index in index_R]
        if ids_SK is not None:
            fields.append(ids_SK)
            for mine, ids in zip(parts, ids_SK.split(plan.rows_out), strict=True):
                mine.append(_Part(ids, None))
            route.backend_state = replace(plan, ids_SK=None)

        def finish(rows: list[Tensor], rows_in: list[int], choices: int) -> Received:
            x_ND, *more = rows
            if ids_SK is not None:
                route.local_ids_NK = more.pop()
                route.num_rows, route.num_choices = sum(rows_in), choices
                route.backend_state = replace(route.backend_state, rows_in=rows_in)
            return Received(x_ND, more[0] if more else None)

        return self._exchange(DISPATCH, fields, parts, plan.rows_out, plan.choices_out, finish)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        plan: _Plan = route.backend_state
        if plan.rows_in is None:
            raise RuntimeError("the rows of a route are not known yet: wait for its first dispatch")
        fields = [y_ND.detach()] if weight_grads_NK is None else [y_ND.detach(), weight_grads_NK.detach()]
        parts = [[_Part(t, None) for t in own] for own in zip(*(t.split(plan.rows_in) for t in fields), strict=True)]

        def finish(rows: list[Tensor], _rows_in: list[int], _choices: int) -> Combined:
            # The expert of a choice is on one rank. The other ranks return a zero gradient for its routing weight.
            y_TD, *more = (gather_sum(one, plan.slots_TC, kernels=self.kernels) for one in rows)
            return Combined(y_TD, more[0] if more else None)

        return self._exchange(COMBINE, fields, parts, plan.rows_in, [0] * self.num_ranks, finish)

    # ---- Transfers ----

    def _exchange(
        self, kind: int, fields: Sequence[Tensor], parts: Sequence[Sequence[_Part]], rows_out: list[int],
        choices_out: list[int], finish: Callable[[list[Tensor], list[int], int], V],
    ) -> Pending[V]:  # fmt: skip
        """Start to send parts[r] to rank r. `finish` gets the received rows, their number per rank, and the choices."""
        if self._in_flight == SLOTS:
            raise RuntimeError(f"{SLOTS} transfers are in flight: wait for one of them before you start another")
        number, layout = self._number, _layout(fields)
        self._number, self._in_flight = number + 1, self._in_flight + 1
        with _recorded("send"):
            for peer in self._links:
                notice = Notice(kind, False, -1, number, rows_out[peer], choices_out[peer], layout)
                self._send(peer, parts[peer], notice)

        def receive() -> tuple[list[Tensor], list[int], int]:
            arrived = self._arrived(kind, number, layout)
            own = Notice(kind, False, -1, number, rows_out[self.rank], choices_out[self.rank], layout)
            notices = [arrived.get(source, own) for source in range(self.num_ranks)]
            rows_in = [notice.rows for notice in notices]
            rows = [one.new_empty(sum(rows_in), one.shape[1]) for one in fields]
            for source, outs in enumerate(zip(*(one.split(rows_in) for one in rows), strict=True)):
                self._copy(source, notices[source], parts[self.rank], outs)
            self._in_flight -= 1
            return rows, rows_in, sum(notice.choices for notice in notices)

        def receive_and_finish() -> V:
            with _recorded("receive"):
                received = receive()
            return finish(*received)

        return AsyncResult([], receive_and_finish)

    def _send(self, peer: int, parts: Sequence[_Part], notice: Notice) -> None:
        if not notice.rows:
            self._mailbox.post(peer, notice)
            return
        link, file = self._links[peer], None
        self._mailbox.wait(lambda: [] if link.free else [peer], f"it freed a slot for {_name(notice)}")
        slot = link.free.pop()  # the one that was freed last, which may still be in a cache
        fields = [part.rows for part in parts]
        needed = sum(field_bytes(one, notice.rows) for one in fields)
        if slot not in link.written or link.written[slot].bytes < needed:
            file = create_file(needed)
            link.written[slot] = Segment(file)
        for part, out in zip(parts, link.written[slot].fields(fields, notice.rows), strict=True):
            part.write(out, self.kernels)
        self._mailbox.post(peer, notice._replace(slot=slot, has_file=file is not None), file)
        if file is not None:
            os.close(file)

    def _arrived(self, kind: int, number: int, layout: int) -> dict[int, Notice]:
        """Wait for an operation of all peers. Returns the notice of each."""
        what = f"its {_OPERATIONS[kind]} (operation {number})"
        self._mailbox.wait(lambda: [peer for peer, link in self._links.items() if number not in link.arrived], what)
        notices = {peer: link.arrived.pop(number) for peer, link in self._links.items()}
        for peer, notice in notices.items():
            if (notice.kind, notice.layout) != (kind, layout):
                rows = " with rows of another width or dtype" * (notice.kind == kind)
                mine, theirs = self._mailbox.names[self.rank], self._mailbox.names[peer]
                raise RuntimeError(
                    f"rank {mine} waits for {what}, but rank {theirs} called {_OPERATIONS[notice.kind]}{rows}: all "
                    "ranks must call the same operations in the same order"
                )
        return notices

    def _copy(self, source: int, notice: Notice, own: Sequence[_Part], outs: Sequence[Tensor]) -> None:
        """Copy the rows from `source`, and free its slot."""
        if source == self.rank:
            for part, out in zip(own, outs, strict=True):
                part.write(out, self.kernels)
        elif notice.rows:
            for rows, out in zip(self._links[source].read[notice.slot].fields(outs, notice.rows), outs, strict=True):
                out.copy_(rows)
            self._mailbox.post(source, Notice(FREED, False, notice.slot))

    def _on_notice(self, peer: int, notice: Notice, file: int | None) -> None:
        link = self._links[peer]
        if notice.kind == FREED:
            link.free.append(notice.slot)
            return
        if file is not None:
            link.read[notice.slot] = Segment(file)
            os.close(file)
        link.arrived[notice.number] = notice


@contextmanager
def _recorded(name: str) -> Iterator[None]:
    """Annotate a transfer, for the profiler."""
    with annotation(f"{SHARED}::{name}"), annotation(f"{SHARED}:{name}"):
        yield


def _layout(fields: Sequence[Tensor]) -> int:
    return zlib.crc32(repr([(t.shape[1], t.dtype) for t in fields]).encode())


def _name(notice: Notice) -> str:
    return f"{_OPERATIONS[notice.kind]} (operation {notice.number})"
