"""Rows are pushed to the windows of virtual ranks and received in order, and nothing else is read or written.

All ranks are in one process: each operation runs on all of them, before any waits for it.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton")

from moe_dualpipe.expert_parallel.sends import count_sends
from moe_dualpipe.kernels.gpu import signals
from moe_dualpipe.kernels.gpu.push import push
from moe_dualpipe.kernels.gpu.receive import receive_rows, receive_sums
from tests.support.kernels import DEVICE
from tests.support.virtual_ranks import SLOTS, UNTOUCHED, VirtualRanks, operation

K = 3


@pytest.mark.parametrize("kind", ["random", "one rank", "no expert"])
@pytest.mark.parametrize("words,num_sms", [(4, 1), (12, 3), (1028, 2)])
@pytest.mark.quick("12-3-random", "1028-2-one rank", "4-1-no expert")
def test_rows_weights_and_ids_arrive_sorted_by_rank_and_token(kind, words, num_sms):
    tokens, ranks, per_rank = 7, 3, 2
    group = VirtualRanks(ranks, tokens, words, num_sms)
    xs = torch.randint(0, 1 << 30, (ranks, tokens, words), dtype=torch.int32, device=DEVICE).view(torch.float32)
    weights = torch.rand(ranks, tokens, K, device=DEVICE)
    ids = torch.randint(-1, ranks * per_rank, (ranks, tokens, K), device=DEVICE)
    if kind != "random":
        ids.fill_(4 if kind == "one rank" else -1)
    for windows, x, own, given in zip(group.each, xs, weights, ids, strict=True):
        counts_R2, finder = count_sends(given, per_rank * ranks, ranks, "auto")
        tokens_M, ids_MK, _ = finder.find()
        offsets = functional.pad(counts_R2[:, 0].cumsum(0), (1, 0)).int()
        push(windows, operation(0), x, tokens_M, offsets, own.clone(), ids_MK)
    for rank, windows in enumerate(group.each):
        chosen = ids // per_rank == rank
        sent = [each.any(1).nonzero().flatten() for each in chosen]
        filled = torch.tensor([len(each) for each in sent])
        past_T = torch.arange(tokens) >= filled[:, None]
        assert (group.windows(rank, 0)[past_T.to(DEVICE)] == UNTOUCHED).all()
        assert (group.windows(rank, 1) == UNTOUCHED).all()
        out = torch.full((ranks * tokens, words), torch.nan, device=DEVICE)
        own, got = (t.to(DEVICE) for t in (torch.full((ranks * tokens, K), -7.0), torch.empty(ranks * tokens, K).int()))
        offsets = torch.empty(ranks + 1, dtype=torch.int32, device=DEVICE)
        receive_rows(windows, operation(0), out, offsets, own, got)
        assert offsets.diff().tolist() == filled.tolist()
        local = torch.where(chosen, ids % per_rank, -1).int()
        total = int(filled.sum())
        for received, given in ((out.view(torch.int32), xs.view(torch.int32)), (own, weights), (got, local)):
            expected = torch.cat([of_rank[index] for of_rank, index in zip(given, sent, strict=True)])
            assert torch.equal(received[:total], expected)
        assert out[total:].isnan().all() and (own[total:] == -7).all() and (got[total:] == -1).all()
    assert not any(windows.state[0] for windows in group.each)


def pushed(group, rank, number, layout=1, tokens=2):
    offsets = torch.tensor([0] + [tokens] * 3, dtype=torch.int32, device=DEVICE)  # all to rank 0
    push(group.each[rank], operation(number, layout), torch.ones(tokens, 4, device=DEVICE), None, offsets)


@pytest.mark.parametrize("failure", [signals.NOT_SENT, signals.NOT_FREED, signals.OTHER_LAYOUT, signals.OVER_CAPACITY])
def test_a_failure_is_reported_once_and_stops_all_later_operations(failure):
    """Rank 1 leaves something out, and rank 0 has a limit."""
    group = VirtualRanks(3, 3, 4, 2)
    group.each[0] = replace(group.each[0], timeout=0.001)
    x = torch.zeros(6 - (failure == signals.OVER_CAPACITY), 4, device=DEVICE)
    offsets = torch.full((4,), 5, dtype=torch.int32, device=DEVICE)
    for number in range(1 + SLOTS * (failure == signals.NOT_FREED)):
        for rank in range(3):
            if (rank, failure) != (1, signals.NOT_SENT) and (rank == 0 or number < SLOTS):
                pushed(group, rank, number, 2 if (rank, failure) == (1, signals.OTHER_LAYOUT) else 1)
        if number < SLOTS:
            receive_rows(group.each[0], operation(number), x, offsets)
    found = {
        signals.NOT_SENT: [1, 0, 1, 0], signals.NOT_FREED: [1, 2, 1, 0], signals.OTHER_LAYOUT: [1, 0, 1, 2],
        signals.OVER_CAPACITY: [0, 0, 1, 6],
    }[failure]  # fmt: skip
    windows, memory = group.each[0], group.memory.clone()
    assert windows.state[:5].tolist() == [failure, *found]
    assert failure == signals.NOT_FREED or (x.isnan().all() and (offsets == 0).all())
    pushed(group, 0, 1, tokens=1)
    for dtype in (torch.float32, torch.float16):  # what is received now is NaN in any dtype, and has no experts
        x, y = (torch.zeros(rows, 8, dtype=dtype, device=DEVICE) for rows in (9, 5))
        weights, grads = torch.zeros(9, K, device=DEVICE), torch.zeros(9, K, device=DEVICE)
        ids = torch.zeros(9, K, dtype=torch.int32, device=DEVICE)
        offsets = torch.full((4,), 5, dtype=torch.int32, device=DEVICE)
        receive_rows(windows, operation(1), x, offsets, weights, ids)
        assert x.isnan().all() and weights.isnan().all() and (ids == -1).all() and (offsets == 0).all()
        receive_sums(windows, operation(1), y, ids[:5], offsets, grads[:5])
        assert y.isnan().all() and grads[:5].isnan().all() and (grads[5:] == 0).all()
    assert torch.equal(group.memory, memory) and windows.state[:5].tolist() == [failure, *found]
