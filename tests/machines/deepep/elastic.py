"""DeepEP 2: deep_ep/buffers/elastic.py and csrc/elastic/buffer.hpp, with one scale-out rank and no expansion."""

import torch

from .common import (
    EventHandle,
    check_event,
    check_ids,
    check_rows,
    check_weights,
    counts_in,
    exchange,
    localize,
    pending,
)

AUTOMATIC_SMS = 6


class EPHandle:
    def __init__(self, num_experts, num_max_tokens_per_rank, num_sms, topk_idx, received, recv_src_metadata, rows):
        self.num_experts, self.num_max_tokens_per_rank, self.num_sms = num_experts, num_max_tokens_per_rank, num_sms
        self.topk_idx, self.num_recv_tokens_per_expert_list = topk_idx, received
        self.recv_src_metadata, self.num_recv_tokens = recv_src_metadata, len(recv_src_metadata)
        self.rows_out, self.rows_in = rows
        self.before_sort = None

    def deterministic_sort(self, cached, tensors):
        """Sort by the source's rank and token. The handle itself is sorted with the first dispatch."""
        if not cached:
            self.before_sort = self.recv_src_metadata.clone()
        assert self.before_sort is not None, "the first dispatch has not been waited for"
        order = self.before_sort[:, 0].sort().indices
        for tensor in [*tensors, *([] if cached else [self.recv_src_metadata])]:
            if tensor is not None:
                tensor.copy_(tensor[order])


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
        self.calls = []

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
        self.calls.append("cached dispatch" if cached else "dispatch")
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
            handle = self._notify(topk_idx, num_experts, num_sms, do_handle_copy)
            assert do_cpu_sync, "without it, the number of rows is that of the worst case"
        received = self._send(x, topk_idx, topk_weights, handle)
        (x_ND, ids_NK, weights_NK), event = pending(received)
        if self.deterministic:
            event.hook = lambda: handle.deterministic_sort(cached, [x_ND, ids_NK, weights_NK])
        return x_ND, ids_NK, weights_NK, handle, event

    def combine(
        self, x, handle, topk_weights=None, bias=None, num_sms=0, num_qps=0, previous_event=None,
        previous_event_before_epilogue=None, async_with_compute_stream=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        self.calls.append("combine")
        self._check_call(x, previous_event, async_with_compute_stream, allocate_on_comm_stream)
        assert bias is None and len(x) == len(handle.recv_src_metadata)
        order = handle.recv_src_metadata[:, 0].sort().indices
        rows_SD = exchange(x[order], handle.rows_in, handle.rows_out, self.group).float()
        ids_TK, ranks = handle.topk_idx, self._ranks(handle.topk_idx, handle.num_experts)
        y_TD, grads_TK, grads_SK = torch.zeros(len(ids_TK), x.shape[1]), None, None
        if topk_weights is not None:
            check_weights(topk_weights, len(x))
            assert topk_weights.shape[1] == ids_TK.shape[1]
            grads_SK = exchange(topk_weights[order], handle.rows_in, handle.rows_out, self.group)
            grads_TK = torch.zeros(ids_TK.shape)
        slots = {key: slot for slot, key in enumerate(self._sent(ranks))}
        for token, line in enumerate(ranks.tolist()):
            for rank in dict.fromkeys(r for r in line if r >= 0):  # in the order of the choices
                y_TD[token] += rows_SD[slots[rank, token]]
            for k, rank in enumerate(line):
                if grads_TK is not None and rank >= 0:
                    grads_TK[token, k] = grads_SK[slots[rank, token], k]
        (y, grads), event = pending([y_TD.bfloat16(), grads_TK])
        return y, grads, event

    def _check_call(self, x, previous_event, asynchronous, allocate_on_comm_stream):
        check_rows(x)
        assert x.shape[1] == self.hidden and x.shape[1] % 256 == 0
        check_event(previous_event, asynchronous, allocate_on_comm_stream, EventHandle)

    def _ranks(self, ids_TK, num_experts):
        return torch.where(ids_TK >= 0, ids_TK // (num_experts // self.ranks), -1)

    def _sent(self, ranks_TK):
        """(rank, token) of the rows to send, by rank."""
        lines = ranks_TK.tolist()
        return [(rank, token) for rank in range(self.ranks) for token, line in enumerate(lines) if rank in line]

    def _notify(self, ids_TK, num_experts, num_sms, do_handle_copy):
        sent = self._sent(self._ranks(ids_TK, num_experts))
        rows_out = [sum(rank == r for rank, _ in sent) for r in range(self.ranks)]
        rows = rows_out, counts_in(rows_out, self.group)
        most = self.num_max_tokens_per_rank
        source = torch.tensor([[self.rank * most + token] for _, token in sent], dtype=torch.int32).view(-1, 1)
        metadata = exchange(source, *rows, self.group).repeat(1, 2 + ids_TK.shape[1])
        ids_NK = self._localized(ids_TK, num_experts, rows)
        received = torch.bincount(ids_NK[ids_NK >= 0], minlength=num_experts // self.ranks).tolist()
        ids = ids_TK.clone() if do_handle_copy else ids_TK
        return EPHandle(num_experts, most, num_sms, ids, received, self._arrived(metadata, rows[1]), rows)

    def _localized(self, ids_TK, num_experts, rows):
        token_S = torch.tensor([t for _, t in self._sent(self._ranks(ids_TK, num_experts))], dtype=torch.int64)
        return localize(exchange(ids_TK[token_S], rows[0], rows[1], self.group), num_experts // self.ranks, self.rank)

    def _send(self, x, ids_TK, weights_TK, handle):
        rows = handle.rows_out, handle.rows_in
        token_S = torch.tensor([t for _, t in self._sent(self._ranks(ids_TK, handle.num_experts))], dtype=torch.int64)
        x_ND = exchange(x[token_S], *rows, self.group)
        weights_NK = None if weights_TK is None else exchange(weights_TK[token_S], *rows, self.group)
        tensors = x_ND, self._localized(ids_TK, handle.num_experts, rows), weights_NK
        return [None if t is None else self._arrived(t, rows[1]) for t in tensors]

    def _arrived(self, rows_NC, rows_in):
        """Tokens take their places as they come: here, the last token of each rank is first."""
        return torch.cat([part.flip(0) for part in rows_NC.split(rows_in)])
