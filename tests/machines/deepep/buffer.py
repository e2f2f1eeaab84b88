"""DeepEP 1: deep_ep/buffers/legacy.py and csrc/legacy/buffer.hpp, within one host."""

from typing import NamedTuple

import torch

from .common import (
    EventHandle,
    EventOverlap,
    Sends,
    check_event,
    check_ids,
    check_rows,
    check_weights,
    pending,
    ranks_of,
)


class Config(NamedTuple):
    kind: str
    num_sms: int

    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return self.num_sms * num_ranks * hidden_bytes * (6 if self.kind == "dispatch" else 4)

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        return 0


class Handle(NamedTuple):
    sends: Sends
    num_sms: int  # its channels are half as many


class Buffer:
    num_sms = 20

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=False, enable_shrink=False,
        comm=None,
    ):  # fmt: skip
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes

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
        check_event(previous_event, async_finish, allocate_on_comm_stream, EventOverlap)
        check_ids(topk_idx)
        in_rank = ranks_of(topk_idx, num_experts, self.ranks)
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
            assert topk_idx is None and topk_weights is None and handle.num_sms == config.num_sms
            (x_ND,), event = pending([handle.sends.there(x)])
            return x_ND, None, None, None, None, event
        for counts in (num_tokens_per_rank, num_tokens_per_expert):
            assert counts.dtype == torch.int32 and counts.dim() == 1 and counts.is_contiguous()
        assert is_token_in_rank.shape == (len(x), self.ranks) and is_token_in_rank.dtype == torch.bool
        assert is_token_in_rank.is_contiguous() and num_tokens_per_rank.tolist() == is_token_in_rank.sum(0).tolist()
        check_ids(topk_idx)
        check_weights(topk_weights, len(x))
        assert topk_weights.shape == topk_idx.shape
        sends, local = Sends(is_token_in_rank, self.group), len(num_tokens_per_expert) // self.ranks
        ids_NK = sends.local_ids(topk_idx, local)
        weights_NK = sends.there(topk_weights) * (ids_NK >= 0)
        received = torch.bincount(ids_NK[ids_NK >= 0], minlength=local).tolist()
        (x_ND, ids_NK, weights_NK), event = pending([sends.there(x), ids_NK, weights_NK])
        return x_ND, ids_NK, weights_NK, received, Handle(sends, config.num_sms), event

    def combine(
        self, x, handle, topk_weights=None, bias=None, config=None, previous_event=None, async_finish=False,
        allocate_on_comm_stream=False,
    ):  # fmt: skip
        self._check_call(x, config, "combine")
        check_event(previous_event, async_finish, allocate_on_comm_stream, EventOverlap)
        assert bias is None and handle.num_sms == config.num_sms and sum(handle.sends.rows_in) == len(x)
        if topk_weights is not None:
            check_weights(topk_weights, len(x))
        grads_TK = None if topk_weights is None else handle.sends.back(topk_weights)
        (y_TD, grads_TK), event = pending([handle.sends.back(x).bfloat16(), grads_TK])
        return y_TD, grads_TK, event

    def _check_call(self, x, config, kind):
        check_rows(x)
        assert x.shape[1] * x.element_size() // 16 % 2 == 0
        assert config is not None and config.kind == kind and config.num_sms % 2 == 0
        assert config.get_nvl_buffer_size_hint(x.shape[1] * 2, self.ranks) <= self.num_nvl_bytes
