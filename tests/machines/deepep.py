"""A stand-in for deep_ep's ElasticBuffer, on CPU tensors and gloo, after DeepEP 2.1.0 (commit dd758caf).

It has the signatures in deepep_signatures.json and checks what the Python class (deep_ep/buffers/elastic.py) and the
C++ below it (csrc/elastic/buffer.hpp) assert: dtypes, shapes, contiguity, and which arguments may be combined; with one
scale-out rank and no expansion. AllToAll makes the transfers, so results can be compared. What the real library
writes on its own stream is NaN or -9 until the event has been waited for.
"""

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from moe_dualpipe.expert_parallel import AllToAll
from moe_dualpipe.expert_parallel.deepep import backend
from moe_dualpipe.expert_parallel.deepep.library import GpuMachine

AUTOMATIC_SMS = 6


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


def check_event(event, asynchronous, allocate_on_comm_stream):
    """allocate_on_comm_stream needs an event and an asynchronous call. Each event is captured just before its call."""
    assert isinstance(event, EventHandle), "previous_event must be an EventHandle"
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


class EPHandle:
    """route: of AllToAll, which makes the transfers. order: of the received rows, which come last row first."""

    def __init__(self, num_experts, num_sms, topk_idx, route):
        self.num_experts, self.num_sms, self.topk_idx, self.route = num_experts, num_sms, topk_idx, route
        ids_NK = route.local_ids_NK
        self.num_recv_tokens_per_expert_list = torch.bincount(ids_NK[ids_NK >= 0]).tolist()
        self.order = self.arrived = torch.arange(len(ids_NK)).flip(0)
        self.is_sorted = False

    def deterministic_sort(self, cached, tensors):
        """Sort by the source's rank and token. The handle itself is sorted with the first dispatch."""
        assert self.is_sorted or not cached, "the first dispatch has not been waited for"
        for tensor in tensors:
            if tensor is not None:
                tensor.copy_(tensor[self.arrived])
        self.is_sorted, self.order = True, torch.arange(len(self.arrived))


class ElasticBuffer:
    def __init__(
        self, group, num_bytes=None, num_cpu_bytes=0, num_max_tokens_per_rank=0, hidden=0, num_topk=0,
        use_fp8_dispatch=False, deterministic=False, allow_hybrid_mode=True, allow_multiple_reduction=True,
        prefer_overlap_with_compute=True, sl_idx=3, num_allocated_qps=0, num_cpu_timeout_secs=300,
        num_gpu_timeout_secs=100, explicitly_destroy=False,
    ):  # fmt: skip
        assert num_max_tokens_per_rank > 0 and hidden > 0
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk or 32
        self.deterministic = deterministic

    @staticmethod
    def capture():
        return EventHandle()

    def dispatch(
        self, x, topk_idx=None, topk_weights=None, cumulative_local_expert_recv_stats=None, num_experts=None,
        num_max_tokens_per_rank=None, expert_alignment=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
        handle=None, do_handle_copy=True, do_cpu_sync=None, do_expand=False, do_zero_padding=False,
        use_tma_aligned_col_major_sf=False,
    ):  # fmt: skip
        assert not do_expand and not do_zero_padding and expert_alignment is None
        cached = handle is not None
        if num_sms == 0 and num_experts is None:
            raise TypeError("the number of multiprocessors cannot be estimated without num_experts")
        num_sms = num_sms or AUTOMATIC_SMS
        self._check_call(x, previous_event, async_with_compute_stream, allocate_on_comm_stream)
        if cached:
            assert topk_idx is None and not do_cpu_sync
            topk_idx, num_experts = handle.topk_idx, num_experts or handle.num_experts
            assert num_experts == handle.num_experts
            assert num_sms == handle.num_sms, "the channels of a handle between hosts depend on num_sms"
        check_ids(topk_idx)
        assert len(topk_idx) == len(x) <= self.num_max_tokens_per_rank and topk_idx.shape[1] <= self.num_topk
        if topk_weights is not None:
            check_weights(topk_weights, len(x))
        assert cached or do_cpu_sync, "without it, the number of rows is that of the worst case"
        ep = AllToAll(num_experts, self.group)
        route = handle.route if cached else ep.prepare(topk_idx)
        received = ep.dispatch(x, route, topk_weights).wait()
        if not cached:
            handle = EPHandle(num_experts, num_sms, topk_idx.clone() if do_handle_copy else topk_idx, route)
        values = [received.x_ND, route.local_ids_NK, received.weights_NK]
        (x_ND, ids_NK, weights_NK), event = pending([None if v is None else v[handle.arrived] for v in values])
        if self.deterministic:
            event.hook = lambda: handle.deterministic_sort(cached, [x_ND, ids_NK, weights_NK])
        return x_ND, ids_NK, weights_NK, handle, event

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        self._check_call(x, previous_event, async_with_compute_stream, allocate_on_comm_stream)
        assert bias is None and len(x) == len(handle.order)
        if topk_weights is not None:
            check_weights(topk_weights, len(x))
            assert topk_weights.shape[1] == handle.topk_idx.shape[1]
            topk_weights = topk_weights[handle.order]
        ep = AllToAll(handle.num_experts, self.group)
        (y, grads), event = pending([*ep.combine(x[handle.order], handle.route, topk_weights).wait()])
        return y, grads, event

    def _check_call(self, x, previous_event, asynchronous, allocate_on_comm_stream):
        check_rows(x)
        assert x.shape[1] == self.hidden and x.shape[1] % 256 == 0
        check_event(previous_event, asynchronous, allocate_on_comm_stream)


@contextlib.contextmanager
def installed(old: bool = False, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """deep_ep can be imported; the machine has a GPU, and its tensors are CPU tensors. old: it is DeepEP 1."""
    library = types.ModuleType("deep_ep")
    classes = {} if old else {"ElasticBuffer": ElasticBuffer}
    vars(library).update(classes, topk_idx_t=torch.int64, __version__="1.2.1" if old else "2.1.0")
    machine = mock.patch.object(backend, "inspect_machine", lambda _group: GpuMachine("cpu", capability))
    with mock.patch.dict(sys.modules, deep_ep=library), machine:
        yield
