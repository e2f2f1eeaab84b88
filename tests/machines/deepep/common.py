"""What both stand-ins share: events, checks, and an exchange of rows over gloo."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class EventHandle:
    """A captured event. `used`: a call has waited for it."""

    def __init__(self):
        self.used = False


class EventOverlap:
    """The event of a call. Results appear when it is waited for, and the hook runs once, after that."""

    def __init__(self, event=None, results=()):
        self.event, self.results = event, list(results)
        self.hook: Callable[[], None] | None = None

    def current_stream_wait(self, release_handle=False):
        assert self.event is not None
        for tensor, value in self.results:
            tensor.copy_(value)
        self.results = []
        if self.hook is not None:
            hook, self.hook = self.hook, None
            hook()


def pending(values: list[Any]) -> tuple[list[Any], EventOverlap]:
    """Tensors without their values, and the event that brings them."""
    tensors = [None if v is None else torch.full_like(v, float("nan") if v.is_floating_point() else -9) for v in values]
    results = [(t, v) for t, v in zip(tensors, values, strict=True) if t is not None and v is not None]
    return tensors, EventOverlap(EventHandle(), results)


def check_event(previous_event, asynchronous, allocate_on_comm_stream, of):
    """allocate_on_comm_stream needs an event and an asynchronous call. Each event is captured just before its call."""
    assert isinstance(previous_event, of), f"previous_event must be {of.__name__}"
    event = getattr(previous_event, "event", previous_event)
    assert not event.used, "this event does not cover the work queued since an earlier call"
    event.used = True
    assert asynchronous and allocate_on_comm_stream


def check_rows(x: Tensor) -> None:
    assert x.dim() == 2 and x.is_contiguous()
    assert x.dtype == torch.bfloat16
    assert x.shape[1] * x.element_size() % 16 == 0


def check_weights(weights: Tensor, rows: int) -> None:
    assert weights.dim() == 2 and weights.is_contiguous() and weights.dtype == torch.float32
    assert len(weights) == rows


def check_ids(ids: Tensor) -> None:
    assert ids.dim() == 2 and ids.is_contiguous() and ids.dtype == torch.int64
    assert ids.shape[1] <= 32


def exchange(rows: Tensor, rows_out: list[int], rows_in: list[int], group) -> Tensor:
    """All-to-all of rows of any dtype."""
    width = rows.shape[1] * rows.element_size()
    received = torch.empty(sum(rows_in), width, dtype=torch.uint8)
    sent = rows.contiguous().view(torch.uint8).view(len(rows), width)
    dist.all_to_all_single(received, sent, rows_in, rows_out, group=group)
    return received.view(rows.dtype) if len(received) else rows.new_empty(0, rows.shape[1])


def ranks_of(ids_TK: Tensor, num_experts: int, num_ranks: int) -> Tensor:
    """[T, R]: whether a rank has an expert of a token."""
    ranks_TK = torch.where(ids_TK >= 0, ids_TK // (num_experts // num_ranks), -1)
    return torch.stack([(ranks_TK == r).any(1) for r in range(num_ranks)], 1)


class Sends:
    """The rows that go to each rank and come from it. token_S: of each row that is sent."""

    def __init__(self, in_rank_TR: Tensor, group):
        self.group, self.num_tokens, self.rows_out = group, len(in_rank_TR), in_rank_TR.sum(0).tolist()
        self.token_S = torch.cat([r.nonzero()[:, 0] for r in in_rank_TR.T])
        counts = torch.empty(len(self.rows_out), dtype=torch.int64)
        dist.all_to_all_single(counts, torch.tensor(self.rows_out), group=group)
        self.rows_in = counts.tolist()

    def there(self, rows_TC: Tensor) -> Tensor:
        return exchange(rows_TC[self.token_S], self.rows_out, self.rows_in, self.group)

    def local_ids(self, ids_TK: Tensor, experts_per_rank: int) -> Tensor:
        """The ids of received rows: those of this rank's experts from 0; -1 for others."""
        ids_NK = self.there(ids_TK)
        local = ids_NK - self.group.rank() * experts_per_rank
        return torch.where((ids_NK >= 0) & (local >= 0) & (local < experts_per_rank), local, -1)

    def back(self, rows_NC: Tensor) -> Tensor:
        """The sum of a token's rows over ranks, in their order."""
        total = torch.zeros(self.num_tokens, rows_NC.shape[1])
        rows_SC = exchange(rows_NC, self.rows_in, self.rows_out, self.group).float()
        for row, token in zip(rows_SC, self.token_S.tolist(), strict=True):
            total[token] += row
        return total
