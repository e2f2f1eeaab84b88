"""The common part of backends with variable-sized all-to-alls: which rows go where, and how they are packed.

A token is sent once to each rank that holds any of its experts:

    prepare   sends the number of rows and choices for each rank                       2 numbers per rank
    dispatch  sends rows, with routing weights if given; the first also expert ids     [T, D] -> [N, D]
    combine   sends back one row per received row; the source sums them over ranks     [N, D] -> [T, D]

The host must know the sizes before it can start a dispatch. `prepare` starts to exchange them without waiting, and the
first dispatch waits for them. Work that is queued in between hides that latency.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.permute import gather, gather_sum
from ..overlap.annotation import annotation
from ..overlap.labels import SIZES_WAIT
from ..overlap.waits import wait_for_all
from .divided import DividedExperts
from .protocol import Combined, Pending, Received, Route
from .sends import Sends, count_sends

V = TypeVar("V")
ALIGNMENT = 16  # bytes; each field of a row of a message starts at a multiple of it
ROW_ALIGNMENT = 128  # bytes; the length of a row is a multiple of it, a cache line of a GPU


class AsyncResult(Generic[V]):
    """A result that is computed later: the first `wait` waits for all `works`, then calls `finish`."""

    def __init__(self, works: Sequence[Any], finish: Callable[[], V]):
        self._works: Sequence[Any] = works
        self._finish: Callable[[], V] | None = finish
        self._value: V | None = None

    def wait(self) -> V:
        if self._finish is not None:
            wait_for_all(self._works)
            self._value = self._finish()
            self._works, self._finish = (), None
        return self._value  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class _UnsizedPlan:
    """State of a route after prepare: a _SendPlan before the sizes are known.

    counts_2R2: [sent, received] x rank x [rows, choices].
    """

    sends: Sends
    counts_2R2: Pending[Tensor]


@dataclass(frozen=True, slots=True)
class _SendPlan:
    """State of a route after its first dispatch: the rows that this rank sends.

    sent_S: the token of each of the S sent rows. slots_TC: the sent rows of each token (sends.py). rows_out, rows_in:
    number of rows sent to and received from each rank.
    """

    sent_S: Tensor
    slots_TC: Tensor
    rows_out: list[int]
    rows_in: list[int]


class Exchange(DividedExperts, ABC):
    """Expert parallelism by all-to-alls."""

    @abstractmethod
    def all_to_all_counts(self, counts_R2: Tensor) -> Pending[Tensor]:
        """Start to send row r of counts_R2 to rank r. Returns [sent, received], [2, R, 2], on the host."""

    @abstractmethod
    def all_to_all(self, rows: Tensor, rows_out: list[int], rows_in: list[int]) -> Pending[Tensor]:
        """Start to send contiguous `rows`: the first rows_out[0] to rank 0, and so on. Returns the received rows."""

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        counts_R2, finder = count_sends(expert_ids_TK, self.num_experts, self.num_ranks, self.kernels)
        counts_2R2 = self.all_to_all_counts(counts_R2)
        # While the sizes travel, do what does not need them. Then only views remain to be made when they arrive.
        plan = _UnsizedPlan(finder.find(), counts_2R2)
        return Route(self.experts_per_rank, self.kernels, backend_state=plan)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Pending[Received]:
        unsized, plan = route.backend_state, self._send_plan(route)
        first_dispatch = isinstance(unsized, _UnsizedPlan)
        fields = [x_TD] if weights_TK is None else [x_TD, weights_TK]
        indices: list[Tensor | None] = [plan.sent_S] * len(fields)
        if first_dispatch:
            fields.append(unsized.sends.ids_MK[: len(plan.sent_S)])
            indices.append(None)
        message = pack(fields, indices, self.kernels)
        exchanged = self.all_to_all(message, plan.rows_out, plan.rows_in)

        def finish() -> Received:
            x_ND, *more = unpack(exchanged.wait(), fields)
            if first_dispatch:
                route.local_ids_NK = more.pop()
            return Received(x_ND, more[0] if more else None)

        return AsyncResult([exchanged], finish)

    def combine(self, y_ND: Tensor, route: Route, weight_grads_NK: Tensor | None = None) -> Pending[Combined]:
        plan = self._send_plan(route)
        fields = [y_ND] if weight_grads_NK is None else [y_ND, weight_grads_NK]
        exchanged = self.all_to_all(pack(fields), plan.rows_in, plan.rows_out)

        def finish() -> Combined:
            # The expert of a choice is on one rank. The other ranks return a zero gradient for its routing weight.
            rows = unpack(exchanged.wait(), fields)
            y_TD, *more = (gather_sum(field, plan.slots_TC, kernels=self.kernels) for field in rows)
            return Combined(y_TD, more[0] if more else None)

        return AsyncResult([exchanged], finish)

    def _send_plan(self, route: Route) -> _SendPlan:
        if isinstance(route.backend_state, _SendPlan):
            return route.backend_state
        unsized: _UnsizedPlan = route.backend_state
        with annotation(SIZES_WAIT):
            counts = unsized.counts_2R2.wait()
        counts_out, counts_in = counts.tolist()
        rows_out, rows_in = [rows for rows, _ in counts_out], [rows for rows, _ in counts_in]
        tokens_M, _, slots_TC = unsized.sends
        route.backend_state = _SendPlan(tokens_M[: sum(rows_out)], slots_TC, rows_out, rows_in)
        route.num_rows, route.num_choices = sum(rows_in), sum(choices for _, choices in counts_in)
        return route.backend_state


def start_copy_to_host(counts: Tensor, device_streams: Any) -> Callable[[], Tensor]:
    """Start a copy to the host. The returned function waits for the copy, but not for work that is queued later."""
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    copied = device_streams.current_stream(counts.device).record_event()

    def read() -> Tensor:
        copied.synchronize()
        return host

    return read


def pack(fields: Sequence[Tensor], indices: Sequence[Tensor | None] | None = None, kernels: Kernels = "auto") -> Tensor:
    """Concatenate the rows of several tensors [S, c] into one message of bytes [S, W]. A single field stays as it is.

    indices: for each field, the rows to take, [S]; None: all rows.

    Example: rows [S, 5] in bfloat16 and weights [S, 2] in float32 start at bytes 0 and 16 of rows of 128 bytes.
    """
    indices = indices or [None] * len(fields)
    # The rows of an expanded gradient (stride 0) do not exist in memory and cannot be gathered.
    fields = [t if t.stride(1) == 1 else t.contiguous() for t in fields]
    if len(fields) == 1:
        (field,), (index,) = fields, indices
        return field.contiguous() if index is None else gather(field, index, kernels=kernels)
    *starts, width = _field_offsets(fields)
    num_rows = len(fields[0] if indices[0] is None else indices[0])
    message = torch.empty(num_rows, width, dtype=torch.uint8, device=fields[0].device)
    for field, index, start in zip(fields, indices, starts, strict=True):
        out = message[:, start : start + field.shape[1] * field.element_size()].view(field.dtype)
        out.copy_(field) if index is None else gather(field, index, out, kernels)
    return message


def unpack(message: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return views of the fields of a message from `pack`. like: tensors with the widths and dtypes of the fields."""
    if len(like) == 1:
        return [message]
    *starts, _ = _field_offsets(like)
    stops = [start + t.shape[1] * t.element_size() for start, t in zip(starts, like, strict=True)]
    return [message[:, a:b].view(t.dtype) for a, b, t in zip(starts, stops, like, strict=True)]


def row_bytes(fields: Sequence[Tensor]) -> int:
    """The length of a row of the message of `pack`."""
    return fields[0].shape[1] * fields[0].element_size() if len(fields) == 1 else _field_offsets(fields)[-1]


def _field_offsets(fields: Sequence[Tensor]) -> list[int]:
    """Byte offset of each field in a row, and the length of the row."""
    sizes = (round_up(t.shape[1] * t.element_size(), ALIGNMENT) for t in fields)
    *starts, end = itertools.accumulate(sizes, initial=0)
    return [*starts, round_up(end, ROW_ALIGNMENT)]


def receive_buffer(like: Tensor, num_rows: int) -> Tensor:
    """Memory for `num_rows` rows like those of `like`: the first rows of a buffer with `buffer_rows(num_rows)`."""
    return like.new_empty(buffer_rows(num_rows), *like.shape[1:])[:num_rows]


def buffer_rows(num_rows: int) -> int:
    """Round up to one of 8 numbers for each power of two, so by at most 1/8.

    The number of received rows is different each time. If each number had its own size of buffer, CUDA's caching
    allocator would seldom find a free block that fits, and would split or reserve others.

    Example: 16 to 32 rows are rounded up to even numbers, 1025 rows to 1152.
    """
    return round_up(num_rows, 1 << max(num_rows.bit_length() - 4, 0))


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
