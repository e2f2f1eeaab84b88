"""What the variable-sized all-to-alls have in common: who sends which row, and one message for all that a row carries.

Only rows that are needed travel, each once per rank, however many of its experts live there:

    prepare   [rows, choices] for each rank                                        2 numbers a rank
    dispatch  the rows; the first time with their expert ids, and with their       [T, D] -> [N, D]
              routing weights if there are any
    combine   one row back per row received; the source adds up over ranks         [N, D] -> [T, D]

Sizes must be known on the host. `prepare` only starts to ask for them; the first dispatch reads the answer, which has
had the time of everything in between to come.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.profiler import record_function

from ..kernels.backend import Kernels, validate_kernels
from ..kernels.permute import gather, gather_sum
from ..kernels.routing import ExpertOrder, rank_order
from ..overlap.labels import SIZES_WAIT
from .protocol import Combined, Pending, Received, Route

V = TypeVar("V")
ALIGNMENT = 16  # bytes; every field of a message starts at a multiple


class AsyncResult(Generic[V]):
    """A result that `finish` makes once everything in `works` has been waited for."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], V]):
        self._works: Sequence[Any] = works
        self._finish: Callable[[], V] | None = finish
        self._value: V | None = None

    def wait(self) -> V:
        if self._finish is not None:
            for work in self._works:
                work.wait()
            self._value = self._finish()
            self._works, self._finish = (), None
        return self._value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _PendingCounts:
    """A question on its way. order: of the tokens, by rank. counts_2R2: [out, in] x rank x [rows, choices]."""

    expert_ids_TK: Tensor
    order: ExpertOrder
    counts_2R2: Pending[Tensor]


@dataclass(frozen=True, slots=True)
class _SendPlan:
    """The sender's side of a route.

    sent_S: the token behind each of the S rows sent, by destination rank. slots_TC: the rows in which token t goes, at
    most C = min(K, R) of them, by rank, -1 where there are fewer. rows_out, rows_in: how many rows go to, and come
    from, each rank. ids_SK: the expert ids that go with the rows, local to their destination.
    """

    sent_S: Tensor
    slots_TC: Tensor
    rows_out: list[int]
    rows_in: list[int]
    ids_SK: Tensor


class Exchange(ABC):
    """Experts divided evenly over `num_ranks` ranks, in order; `kernels` move their rows (kernels/backend.py).

    Raises ValueError when the experts cannot be divided, or the kernels cannot be had.
    """

    def __init__(self, num_experts: int, num_ranks: int, rank: int, kernels: Kernels = "auto"):
        self.kernels: Kernels = validate_kernels(kernels)
        if num_ranks < 1 or num_experts % num_ranks:
            raise ValueError(f"{num_experts} experts cannot be divided evenly over {num_ranks} ranks")
        self.num_experts, self.num_ranks, self.rank = num_experts, num_ranks, rank
        self.experts_per_rank = num_experts // num_ranks
        self.local_experts = range(rank * self.experts_per_rank, (rank + 1) * self.experts_per_rank)

    @abstractmethod
    def all_to_all_counts(self, counts_R2: Tensor) -> Pending[Tensor]:
        """Start to give row r to rank r; the result is what this rank is given, stacked below what it gave, on the
        host."""

    @abstractmethod
    def all_to_all(self, rows: Tensor, rows_out: list[int], rows_in: list[int]) -> Pending[Tensor]:
        """Start to give the first rows_out[0] of the contiguous `rows` to rank 0, and so on; the result is what this
        rank is given."""

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        order = rank_order(expert_ids_TK, self.experts_per_rank, self.num_ranks, self.kernels)
        ranks = (expert_ids_TK // self.experts_per_rank).flatten().long()
        choices_R = torch.zeros(self.num_ranks, dtype=torch.int64, device=ranks.device)
        choices_R.scatter_add_(0, ranks, torch.ones_like(ranks))
        counts_R2 = torch.stack([order.expert_offsets.diff().long(), choices_R], dim=1)
        asked = _PendingCounts(expert_ids_TK, order, self.all_to_all_counts(counts_R2))
        return Route(self.experts_per_rank, self.kernels, backend_state=asked)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        plan = self._send_plan(route)
        fields = [x_TD] if weights_TK is None else [x_TD, weights_TK]
        indices: list[Tensor | None] = [plan.sent_S] * len(fields)
        if first := route.local_ids_NK is None:
            fields.append(plan.ids_SK)
            indices.append(None)
        message = pack(fields, indices, self.kernels)
        swapped = self.all_to_all(message, plan.rows_out, plan.rows_in)

        def finish() -> Received:
            x_ND, *more = unpack(swapped.wait(), fields)
            if first:
                route.local_ids_NK = more.pop()
            return Received(x_ND, more[0] if more else None)

        return AsyncResult([swapped], finish)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        plan = self._send_plan(route)
        fields = [y_ND] if weight_grads_NK is None else [y_ND, weight_grads_NK]
        swapped = self.all_to_all(pack(fields), plan.rows_in, plan.rows_out)

        def finish() -> Combined:
            # A choice is local to exactly one of the ranks its token went to; the others returned zero for it.
            rows = unpack(swapped.wait(), fields)
            y_TD, *more = (gather_sum(field, plan.slots_TC, kernels=self.kernels) for field in rows)
            return Combined(y_TD, more[0] if more else None)

        return AsyncResult([swapped], finish)

    def _send_plan(self, route: Route) -> _SendPlan:
        if isinstance(route.backend_state, _SendPlan):
            return route.backend_state
        asked: _PendingCounts = route.backend_state
        with record_function(SIZES_WAIT):  # profilers should not take it for computation
            counts = asked.counts_2R2.wait()
        counts_out, counts_in = counts.tolist()
        rows_out, rows_in = [rows for rows, _ in counts_out], [rows for rows, _ in counts_in]
        expert_ids_TK, order = asked.expert_ids_TK, asked.order
        sent_S = order.gather_idx_M[: sum(rows_out)]
        slots_TC = order.positions_NK.sort(dim=1).values[:, -min(self.num_ranks, expert_ids_TK.shape[1]) :]
        ids_SK, to_S = expert_ids_TK[sent_S], expert_ids_TK.flatten()[order.choice_idx_M[: len(sent_S)]]
        here_SK = ids_SK // self.experts_per_rank == (to_S // self.experts_per_rank)[:, None]
        ids_SK = torch.where(here_SK, ids_SK % self.experts_per_rank, -1).int()
        route.backend_state = _SendPlan(sent_S, slots_TC, rows_out, rows_in, ids_SK)
        route.num_rows, route.num_choices = sum(rows_in), sum(choices for _, choices in counts_in)
        return route.backend_state


def start_copy_to_host(counts: Tensor) -> Callable[[], Tensor]:
    """Start to copy to the host; the result waits for this copy, not for what was queued after it."""
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    copied = torch.cuda.current_stream().record_event()

    def read() -> Tensor:
        copied.synchronize()
        return host

    return read


def pack(fields: Sequence[Tensor], indices: Sequence[Tensor | None] | None = None, kernels: Kernels = "auto") -> Tensor:
    """Columns of different dtypes side by side: [S, c] each -> bytes [S, W]; a single one stays what it is.

    indices: for each field, which of its rows to take, [S]; None: all, as they are.

    Example: rows [S, 5] in bfloat16 and weights [S, 2] in float32 become 16 + 16 bytes a row.
    """
    indices = indices or [None] * len(fields)
    # A gradient can be one number for all: rows that are read by index must be there.
    fields = [t if t.stride(1) == 1 else t.contiguous() for t in fields]
    if len(fields) == 1:
        (field,), (index,) = fields, indices
        return field.contiguous() if index is None else gather(field, index, kernels=kernels)
    *starts, width = _columns(fields)
    num_rows = len(fields[0] if indices[0] is None else indices[0])
    message = torch.empty(num_rows, width, dtype=torch.uint8, device=fields[0].device)
    for field, index, start in zip(fields, indices, starts, strict=True):
        out = message[:, start : start + field.shape[1] * field.element_size()].view(field.dtype)
        out.copy_(field) if index is None else gather(field, index, out, kernels)
    return message


def unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The columns of a message from `pack`, as views: `like` has their widths and dtypes."""
    if len(like) == 1:
        return [message]
    *starts, _ = _columns(like)
    stops = [start + t.shape[1] * t.element_size() for start, t in zip(starts, like, strict=True)]
    return [message[:, a:b].view(t.dtype) for a, b, t in zip(starts, stops, like, strict=True)]


def _columns(fields: Sequence[Tensor]) -> list[int]:
    """Where each field starts, and where the last one ends, in bytes."""
    edges = [0]
    for t in fields:
        edges.append(edges[-1] + -(-t.shape[1] * t.element_size() // ALIGNMENT) * ALIGNMENT)
    return edges
