"""Which variants of the kernels are compiled does not depend on addresses: every argument begins at 16 bytes.

The fixture of this folder checks that for each launch. Here, the tensors that callers pass begin elsewhere.
"""

import warnings

import pytest
import torch

from moe_dualpipe.kernels import backend
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.gpu.sorting import order_by_expert
from moe_dualpipe.kernels.grouped_gemm import grouped_linear, grouped_wgrad
from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.permute import gather, gather_sum, unpermute
from moe_dualpipe.kernels.routing import expert_order, rank_order, route
from tests.support.kernels import DEVICE, offsets_of

N, K, E, D, F = 5, 2, 3, 8, 16
IDS = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [2, 0]], device=DEVICE)  # expert 1 has no rows
INDICES = ("gather_idx_M", "choice_idx_M", "positions_NK", "expert_offsets")


def rows(*shape):
    return torch.randn(*shape, device=DEVICE)


def order(place):
    sorted_ids = expert_order(IDS, E, kernels="triton")
    return ExpertOrder(*(place(getattr(sorted_ids, name)) for name in INDICES))


def gradients(y, *leaves, place):
    return [y, *torch.autograd.grad(y, leaves, place(rows(*y.shape)))]


def routed(place):
    logits = place(rows(N, E)).requires_grad_()
    weights, ids = route(logits, K, bias_E=place(rows(E)), kernels="triton")
    return [ids, *gradients(weights, logits, place=place)]


def unpermuted(place):
    leaves = place(rows(N * K, D)).requires_grad_(), place(rows(N, K)).requires_grad_()
    return gradients(unpermute(leaves[0], order(place), leaves[1], "triton"), *leaves, place=place)


def multiplied(place):
    leaves = place(rows(N, D)).requires_grad_(), place(rows(E, F, D)).requires_grad_()
    return gradients(grouped_linear(*leaves, place(offsets_of([2, 0, 3])), kernels="triton"), *leaves, place=place)


def through_experts(place):
    leaves = [place(rows(*shape)).requires_grad_() for shape in ((N, D), (E, 2 * F, D), (E, D, F), (N, K))]
    for leaf in leaves[1:3]:
        leaf.grad = place(rows(*leaf.shape))
    x, gate_up, down, weights = leaves
    y = experts(x, gate_up, down, order(place), weights, accumulate=True, kernels="triton")
    y.backward(place(rows(N, D)))
    return [y, *(leaf.grad for leaf in leaves)]


def added(place):
    add_to = place(rows(E, F, D))
    grouped_wgrad(place(rows(N, F)), place(rows(N, D)), offsets_of([2, 0, 3]), add_to=add_to, kernels="triton")
    return [add_to]


def gathered(place):
    out = place(rows(3, D))
    gather(place(rows(N, D)), place(torch.tensor([4, 0, 4], device=DEVICE)), out, "triton")
    return [out, gather_sum(out, place(torch.tensor([[1, 2], [0, -1]], device=DEVICE)), place(rows(2, 2)), "triton")]


def ordered(place):
    orders = expert_order(place(IDS), E, kernels="triton"), rank_order(place(IDS), 2, 2, "triton")
    return [getattr(sorted_ids, name) for sorted_ids in orders for name in INDICES]


def shifted(t):
    """A copy of `t` that begins one element after a multiple of 16 bytes."""
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return buffer[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize("operator", [routed, unpermuted, multiplied, through_experts, added, gathered, ordered])
def test_tensors_may_begin_anywhere(operator, monkeypatch):
    monkeypatch.setattr(backend, "_copied", set())
    torch.manual_seed(1)
    expected = operator(lambda t: t)
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=r"is copied for the Triton kernels in each call: it begins . bytes after"):
        results = operator(shifted)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator(shifted)  # warned once


def test_every_table_of_tiles_begins_at_16_bytes():
    for tokens in range(1, 30, 4):
        ids = torch.arange(tokens * K, device=DEVICE).view(tokens, K) % E
        tables = order_by_expert(ids, E, tokens * K, heights=(16, 32, 64)).tile_tables
        assert [table.data_ptr() % 16 for table in tables.values()] == [0, 0, 0]
