"""DeepEP 1: deep_ep/buffers/legacy.py and csrc/legacy/buffer.hpp, within one host."""

from typing import NamedTuple

import torch
import torch.distributed as dist

from .common import (
    EventHandle,
    EventOverlap,
    check_event,
    check_ids,
    check_rows,
    check_weights,
    counts_in,
    exchange,
    localize,
    pending,
)


class Config(NamedTuple):
    kind: str
    num_sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return self.num_sms * num_ranks * hidden_bytes * (6 if self.kind == "dispatch" else 4)

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Buffer:
    num_sms = 20

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, enable_shrink=False,
        comm=None,
    ):  # fmt: skip
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.calls = []

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture():
        return EventOverlap(EventHandle())

    @staticmethod
    def get_dispatch_config(num_ranks):
        assert num_ranks in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
        return Config("dispatch", Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks):
        assert num_ranks in (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
        return Config("combine", Buffer.num_sms)

    def get_dispatch_layout(
        self, topk_idx, num_experts, previous_event=None, async_finish=False, allocate_on_comm_stream=False
    ):
        self.calls.append("layout")
        check_event(previous_event, async_finish, allocate_on_comm_stream, EventOverlap)
        check_ids(topk_idx)
        ranks = torch.where(topk_idx >= 0, topk_idx // (num_experts // self.ranks), -1)
        in_rank = torch.stack([(ranks == r).any(1) for r in range(self.ranks)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, EventOverlap(EventHandle())

    def dispatch(
        self, x, handle=None, num_tokens_per_rank=None, num_tokens_per_rdma_rank=None, is_token_in_rank=None,
        num_tokens_per_expert=None, topk_idx=None, topk_weights=None, expert_alignment=1, num_worst_tokens=0,
        config=None, previous_event=None, async_finish=False, allocate_on_comm_stream=False,
    ):  # fmt: skip
        self._check_call(x, config, "dispatch")
        check_event(previous_event, async_finish, allocate_on_comm_stream, EventOverlap)
        assert expert_alignment == 1 and num_worst_tokens == 0
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            self.calls.append("cached dispatch")
            self._check_handle(handle, config)
            is_token_in_rank, rows_in = handle[4], self._rows_in(handle)
        else:
            self.calls.append("dispatch")
            rows_in = self._notify(num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank)
            assert (topk_idx is None) == (topk_weights is None)
        assert is_token_in_rank.shape == (len(x), self.ranks) and is_token_in_rank.dtype == torch.bool
        assert is_token_in_rank.is_contiguous()
        token_S = torch.cat([r.nonzero()[:, 0] for r in is_token_in_rank.T])
        rows_out = is_token_in_rank.sum(0).tolist()
        x_ND = exchange(x[token_S], rows_out, rows_in, self.group)
        if handle is not None:
            (x_ND,), event = pending([x_ND])
            return x_ND, None, None, None, None, event
        assert topk_idx is not None, "expert ids are needed here"
        check_ids(topk_idx)
        check_weights(topk_weights, len(x))
        assert topk_weights.shape == topk_idx.shape
        local = len(num_tokens_per_expert) // self.ranks
        ids_NK = localize(exchange(topk_idx[token_S], rows_out, rows_in, self.group), local, self.rank)
        weights_NK = exchange(topk_weights[token_S], rows_out, rows_in, self.group) * (ids_NK >= 0)
        received = torch.bincount(ids_NK[ids_NK >= 0], minlength=local).tolist()
        handle = self._handle(token_S, rows_out, rows_in, is_token_in_rank, config)
        (x_ND, ids_NK, weights_NK), event = pending([x_ND, ids_NK, weights_NK])
        return x_ND, ids_NK, weights_NK, received, handle, event

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        self.calls.append("combine")
        self._check_call(x, config, "combine")
        check_event(previous_event, async_finish, allocate_on_comm_stream, EventOverlap)
        self._check_handle(handle, config)
        assert bias is None
        assert len(handle[3]) == len(x)
        rows_in, rows_out = handle[4].sum(0).tolist(), self._rows_in(handle)
        y_TD = self._sum(exchange(x, rows_out, rows_in, self.group).float(), handle).bfloat16()
        grads_TK = None
        if topk_weights is not None:
            check_weights(topk_weights, len(x))
            grads_TK = self._sum(exchange(topk_weights, rows_out, rows_in, self.group), handle)
        (y_TD, grads_TK), event = pending([y_TD, grads_TK])
        return y_TD, grads_TK, event

    def _check_call(self, x, config, kind):
        check_rows(x)
        assert x.shape[1] * x.element_size() // 16 % 2 == 0
        assert config is not None and config.kind == kind and config.num_sms % 2 == 0
        assert config.get_nvl_buffer_size_hint(x.shape[1] * 2, self.ranks) <= self.num_nvl_bytes

    def _check_handle(self, handle, config):
        rank_prefix, channel_prefix, received_prefix, src_idx, in_rank, send_head = handle
        assert rank_prefix.shape == (self.ranks, self.ranks) and src_idx.dim() == 1
        assert channel_prefix.shape == received_prefix.shape == (self.ranks, config.num_sms // 2)
        assert in_rank.shape == send_head.shape

    def _notify(self, per_rank, per_expert, in_rank):
        assert per_rank is not None and in_rank is not None and per_expert is not None
        for counts in (per_rank, per_expert):
            assert counts.dtype == torch.int32 and counts.dim() == 1 and counts.is_contiguous()
        assert len(per_rank) == self.ranks and len(per_expert) % self.ranks == 0
        assert per_rank.tolist() == in_rank.sum(0).tolist()
        return counts_in(per_rank.tolist(), self.group)

    def _handle(self, token_S, rows_out, rows_in, in_rank, config):
        all_in = [torch.empty(self.ranks, dtype=torch.int64) for _ in rows_in]
        dist.all_gather(all_in, torch.tensor(rows_in), group=self.group)
        prefix = torch.stack(all_in, 1).cumsum(0).int()  # [source, destination]
        channels = torch.zeros(self.ranks, config.num_sms // 2, dtype=torch.int32)
        src_idx = exchange(token_S[:, None], rows_out, rows_in, self.group)[:, 0].int()
        return prefix, channels, channels, src_idx, in_rank, torch.where(in_rank, in_rank.cumsum(0) - 1, -1).int()

    def _rows_in(self, handle):
        return handle[0][:, self.rank].diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist()

    def _sum(self, rows_SC, handle):
        """The sum over ranks, in their order."""
        total = torch.zeros(len(handle[4]), rows_SC.shape[1])
        token_S = torch.cat([r.nonzero()[:, 0] for r in handle[4].T])
        for row, token in zip(rows_SC, token_S.tolist(), strict=True):
            total[token] += row
        return total
