"""DeepEP 2: deep_ep/buffers/elastic.py and csrc/elastic/buffer.hpp, with one scale-out rank and no expansion."""

import torch

from .common import EventHandle, Sends, check_event, check_ids, check_rows, check_weights, pending, ranks_of

AUTOMATIC_SMS = 6


class EPHandle:
    """source: of each received row, the rank and the token. arrived: in the order in which they come."""

    def __init__(self, num_experts, num_sms, topk_idx, sends, received, arrived):
        self.num_experts, self.num_sms, self.topk_idx, self.sends = num_experts, num_sms, topk_idx, sends
        self.num_recv_tokens_per_expert_list = received
        self.source = self.arrived = arrived
        self.is_sorted = False

    def deterministic_sort(self, cached, tensors):
        """Sort by the source's rank and token. The handle itself is sorted with the first dispatch."""
        assert self.is_sorted or not cached, "the first dispatch has not been waited for"
        order = self.arrived[:, 0].sort().indices
        for tensor in tensors:
            if tensor is not None:
                tensor.copy_(tensor[order])
        self.is_sorted, self.source = True, self.arrived[order]


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
        if not cached:
            assert do_cpu_sync, "without it, the number of rows is that of the worst case"
            sends, local = Sends(ranks_of(topk_idx, num_experts, self.ranks), self.group), num_experts // self.ranks
            source = torch.arange(len(x))[:, None] + self.rank * self.num_max_tokens_per_rank
            ids_NK = sends.local_ids(topk_idx, local)
            received = torch.bincount(ids_NK[ids_NK >= 0], minlength=local).tolist()
            ids = topk_idx.clone() if do_handle_copy else topk_idx
            handle = EPHandle(num_experts, num_sms, ids, sends, received, arriving(sends.there(source), sends))
        sends = handle.sends
        weights_NK = None if topk_weights is None else arriving(sends.there(topk_weights), sends)
        ids_NK = arriving(sends.local_ids(topk_idx, num_experts // self.ranks), sends)
        (x_ND, ids_NK, weights_NK), event = pending([arriving(sends.there(x), sends), ids_NK, weights_NK])
        if self.deterministic:
            event.hook = lambda: handle.deterministic_sort(cached, [x_ND, ids_NK, weights_NK])
        return x_ND, ids_NK, weights_NK, handle, event

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        self._check_call(x, previous_event, async_with_compute_stream, allocate_on_comm_stream)
        assert bias is None and len(x) == len(handle.source)
        order, grads_TK = handle.source[:, 0].sort().indices, None
        if topk_weights is not None:
            check_weights(topk_weights, len(x))
            assert topk_weights.shape[1] == handle.topk_idx.shape[1]
            grads_TK = handle.sends.back(topk_weights[order])
        (y, grads), event = pending([handle.sends.back(x[order]).bfloat16(), grads_TK])
        return y, grads, event

    def _check_call(self, x, previous_event, asynchronous, allocate_on_comm_stream):
        check_rows(x)
        assert x.shape[1] == self.hidden and x.shape[1] % 256 == 0
        check_event(previous_event, asynchronous, allocate_on_comm_stream, EventHandle)


def arriving(rows_NC, sends):
    """Tokens take their places as they come: here, the last token of each rank is first."""
    return torch.cat([part.flip(0) for part in rows_NC.split(sends.rows_in)])
