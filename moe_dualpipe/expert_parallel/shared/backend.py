"""The backend for CPU ranks of one machine: each rank writes rows into memory that the receiver maps.

    prepare   computes which rows go where; nothing is sent
    dispatch  writes the rows for each rank into a free slot, and tells that rank their number
    combine   sends back one row per received row; the source sums them over ranks

The sender knows the sizes and the receiver learns them with the data, so there is no exchange of sizes beforehand. Each
sender has several slots for each receiver. Every notice of a transfer also says which slots its sender has read. At
most SLOTS transfers of a rank are in flight. So when it starts one, it has heard of one of its peer's last SLOTS, and
before that one the peer had read all but SLOTS - 1 messages: of 2 SLOTS slots, one is free, and a sender never waits. A
message that is too large for its slot gets a larger one.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ...kernels.backend import Kernels
from ...kernels.routing import count_choices
from ...overlap.annotation import annotation
from ...overlap.labels import SHARED
from ..divided import DividedExperts
from ..exchange import AsyncResult
from ..protocol import Combined, Pending, Received, Route
from ..rank_facts import SEVERAL_MACHINES, RankFacts, all_on, several_machines
from ..sends import sent_tokens
from .mailbox import Mailbox, Notice
from .memory import Layout, Segment, create_file, num_bytes, num_rows

V = TypeVar("V")
SLOTS = 4
"""Transfers in flight: two per lane of an overlapped pair."""
DISPATCH, COMBINE = range(2)
_OPERATIONS = "dispatch", "combine"


@dataclass(slots=True)
class _Plan:
    """State of a route. ids_TK: the expert ids; None once sent. tokens_R: the tokens to each rank.

    rows_out: to each rank. rows_in: from each rank, known when the first dispatch has been waited for.
    positions_S, offsets_T: the rows of each token among those that are returned, in the order of ranks, and where the
    rows of a token start.
    """

    ids_TK: Tensor | None
    tokens_R: Sequence[Tensor]
    rows_out: list[int]
    positions_S: Tensor
    offsets_T: Tensor
    rows_in: list[int] | None = None


@dataclass(slots=True)
class _Link:
    """The memory shared with one peer: the slots that this rank writes, and those that it reads.

    free: a bit for each slot that this rank may write. freed: a bit for each that it has read since its last notice.
    arrived: the notices of operations that have not been waited for, by number.
    """

    written: dict[int, Segment] = field(default_factory=dict)
    read: dict[int, Segment] = field(default_factory=dict)
    free: int = (1 << 2 * SLOTS) - 1
    freed: int = 0
    arrived: dict[int, Notice] = field(default_factory=dict)

    def write(self, parts: "Sequence[_Part]", rows: int, layout: Layout) -> tuple[int, int | None]:
        """Write a message. Returns its slot, and the file descriptor of the slot's memory if that is new."""
        assert self.free, "all slots are full"
        bit, file = self.free & -self.free, None  # the lowest one: the fewer are used, the more are in a cache
        self.free, slot = self.free ^ bit, bit.bit_length() - 1
        room = max(1, rows)
        if slot not in self.written or num_rows(self.written[slot].bytes, layout) < room:
            file = create_file(num_bytes(room, layout))
            self.written[slot] = Segment(file)
        for part, out in zip(parts, self.written[slot].fields(layout), strict=True):
            part.write(out[:rows])
        return slot, file


class _Part(NamedTuple):
    """One field of the message to one rank: the rows `index` of `rows`; None: all rows."""

    rows: Tensor
    index: Tensor | None

    def read(self) -> Tensor:
        return self.rows if self.index is None else self.rows.index_select(0, self.index)

    def write(self, out: Tensor) -> None:
        out.copy_(self.rows) if self.index is None else torch.index_select(self.rows, 0, self.index, out=out)


class Shared(DividedExperts):
    """Experts are divided evenly over the ranks of `group`, in order. All ranks are on one machine, with CPU tensors.

    Every rank must call the same operations in the same order, with at most SLOTS transfers in flight. timeout: seconds
    that a rank waits for another one. Creating the backend is collective.

    Raises ValueError if the experts cannot be divided evenly, or if the kernels are not available. Operations raise
    RuntimeError if the ranks call different ones, and DistError, a RuntimeError, if a rank ends or does not answer.
    """

    in_background = False  # copies run on the same core: on two cores, steps without overlap were 3% faster

    def __init__(self, num_experts: int, group: dist.ProcessGroup, kernels: Kernels = "auto", timeout: float = 600.0):
        super().__init__(num_experts, group.size(), group.rank(), kernels)
        # Each rank starts with the next one, so that not all write to rank 0 first.
        self._links = {(self.rank + i) % self.num_ranks: _Link() for i in range(1, self.num_ranks)}
        self._number = self._in_flight = 0
        self._mailbox = Mailbox(group, timeout, self._on_notice)

    @classmethod
    def fault(cls, facts: Sequence[RankFacts]) -> str:
        if not all_on("cpu", facts):
            return "it is for CPUs"
        return SEVERAL_MACHINES if several_machines(facts) else ""

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        count_choices(expert_ids_TK, self.num_experts)  # checks the ids
        sent_RT, _ = sent_tokens(expert_ids_TK.numpy(), self.experts_per_rank, self.num_ranks)
        rank_S, token_S = sent_RT.nonzero()
        rows_out = np.bincount(rank_S, minlength=self.num_ranks).tolist()
        rows_T = np.bincount(token_S, minlength=len(expert_ids_TK))
        arrays = token_S, token_S.argsort(kind="stable"), rows_T.cumsum() - rows_T
        tokens_S, positions_S, offsets_T = map(torch.from_numpy, arrays)
        plan = _Plan(expert_ids_TK, tokens_S.split_with_sizes(rows_out), rows_out, positions_S, offsets_T)
        return Route(self.experts_per_rank, self.kernels, backend_state=plan)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        plan: _Plan = route.backend_state
        ids_TK, plan.ids_TK = plan.ids_TK, None
        fields = [one.detach() for one in (x_TD, weights_TK, ids_TK) if one is not None]
        parts = [[_Part(one, tokens) for one in fields] for tokens in plan.tokens_R]

        def finish(rows: list[Tensor], rows_in: list[int]) -> Received:
            if ids_TK is not None:
                ids_NK = rows.pop()
                own_NK = (ids_NK >= self.local_experts.start) & (ids_NK < self.local_experts.stop)
                route.local_ids_NK = torch.where(own_NK, ids_NK - self.local_experts.start, -1)
                route.num_rows, route.num_choices, plan.rows_in = len(ids_NK), int(own_NK.sum()), rows_in
            x_ND, *weights = rows
            return Received(x_ND, weights[0] if weights else None)

        return self._exchange(DISPATCH, parts, plan.rows_out, finish)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        plan: _Plan = route.backend_state
        if plan.rows_in is None:
            raise RuntimeError("the rows of a route are not known yet: wait for its first dispatch")
        fields = [one.detach() for one in (y_ND, weight_grads_NK) if one is not None]
        by_field = [[_Part(rows, None) for rows in one.split_with_sizes(plan.rows_in)] for one in fields]

        def finish(rows: list[Tensor], _: list[int]) -> Combined:
            # The expert of a choice is on one rank. The other ranks return a zero gradient for its routing weight.
            y_TD, *more = (_sum_bags(one, plan.positions_S, plan.offsets_T) for one in rows)
            return Combined(y_TD, more[0] if more else None)

        return self._exchange(COMBINE, [*zip(*by_field, strict=True)], plan.rows_in, finish)

    # ---- Transfers ----

    def _exchange(
        self, kind: int, parts: Sequence[Sequence[_Part]], rows_out: list[int],
        finish: Callable[[list[Tensor], list[int]], V],
    ) -> Pending[V]:  # fmt: skip
        """Start to send parts[r] to rank r. `finish` gets the received rows, and their number per rank."""
        if self._in_flight == SLOTS:
            raise RuntimeError(f"{SLOTS} transfers are in flight: wait for one of them before you start another")
        number, own = self._number, parts[self.rank]
        self._number, self._in_flight = number + 1, self._in_flight + 1
        layout = tuple((part.rows.shape[1], part.rows.dtype) for part in own)
        checksum = _checksum(layout)
        with annotation(f"{SHARED}::send"), annotation(f"{SHARED}:send"):
            for peer, link in self._links.items():
                rows = rows_out[peer]
                slot, file = link.write(parts[peer], rows, layout)
                notice = Notice(kind, file is not None, slot, number, rows, checksum, link.freed)
                self._mailbox.post(peer, notice, file)
                link.freed = 0
                if file is not None:
                    os.close(file)

        def receive() -> V:
            with annotation(f"{SHARED}::receive"), annotation(f"{SHARED}:receive"):
                messages = [[part.read() for part in own]] * self.num_ranks
                rows_in = [*rows_out]
                arrived = self._arrived(kind, number, checksum)
                for peer, notice in arrived.items():
                    messages[peer] = [one[: notice.rows] for one in self._links[peer].read[notice.slot].fields(layout)]
                    rows_in[peer] = notice.rows
                received = [torch.cat(each) for each in zip(*messages, strict=True)]
                for peer, notice in arrived.items():
                    self._links[peer].freed |= 1 << notice.slot
                self._in_flight -= 1
            return finish(received, rows_in)

        return AsyncResult([], receive)

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

    def _on_notice(self, peer: int, notice: Notice, file: int | None) -> None:
        link = self._links[peer]
        link.free |= notice.freed
        if file is not None:
            link.read[notice.slot] = Segment(file)
            os.close(file)
        link.arrived[notice.number] = notice


def _sum_bags(rows_SD: Tensor, positions_S: Tensor, offsets_T: Tensor) -> Tensor:
    """Sum the rows of each token in fp32 or wider, and round once."""
    wide_SD = rows_SD.to(torch.promote_types(rows_SD.dtype, torch.float32))
    return torch.embedding_bag(wide_SD, positions_S, offsets_T)[0].to(rows_SD.dtype)


@lru_cache(maxsize=256)
def _checksum(layout: Layout) -> int:
    return zlib.crc32(repr(layout).encode())
