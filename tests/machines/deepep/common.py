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


def counts_in(counts_out: list[int], group) -> list[int]:
    received = torch.empty(len(counts_out), dtype=torch.int64)
    dist.all_to_all_single(received, torch.tensor(counts_out), group=group)
    return received.tolist()


def localize(ids_NK: Tensor, experts_per_rank: int, rank: int) -> Tensor:
    """Ids of this rank's experts from 0; -1 for others."""
    local = ids_NK - rank * experts_per_rank
    return torch.where((ids_NK >= 0) & (local >= 0) & (local < experts_per_rank), local, -1)
