"""Which variants of the kernels are compiled does not depend on addresses, and no kernel leaves its arguments.

Every argument begins at 16 bytes. The fixture of this folder checks that, and all accesses, for each launch. Here, the
tensors that callers pass begin elsewhere, and an index is too large in each kind of access, which may change no result.
"""

import pytest
import torch
from triton.runtime.errors import InterpreterError

from moe_dualpipe.kernels import backend
from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.gpu import permute, push, wgrad
from moe_dualpipe.kernels.grouped_gemm import grouped_linear, grouped_wgrad
from moe_dualpipe.kernels.order import ExpertOrder
from moe_dualpipe.kernels.permute import gather, gather_sum, unpermute
from moe_dualpipe.kernels.routing import expert_order, rank_order, route
from tests.support.kernels import DEVICE, offsets_of
from tests.support.virtual_ranks import VirtualRanks, operation

N, K, E, D, F = 5, 2, 3, 8, 16
IDS = torch.tensor([[0, 2], [2, 0], [0, 2], [2, 0], [2, 0]], device=DEVICE)  # expert 1 has no rows
INDICES = ("gather_idx_M", "choice_idx_M", "positions_NK", "expert_offsets")
FEW, SUMMED = (torch.tensor(index, device=DEVICE) for index in ([4, 0, 4], [[1, 2], [0, -1]]))


def order(place):
    sorted_ids = expert_order(IDS, E, kernels="triton")
    return ExpertOrder(*(place(getattr(sorted_ids, name)) for name in INDICES))


def placed_experts(place, x, gate_up, down, weights):
    for leaf in (gate_up, down):
        leaf.grad = place(torch.ones_like(leaf))
    return [experts(x, gate_up, down, order(place), weights, accumulate=True, kernels="triton")]


# What is called, with inputs of these shapes; results that have gradients are differentiated.
OPERATORS = {
    "route": (lambda _place, x, b: [*route(x, K, bias_E=b.detach(), kernels="triton")], [(N, E), (E,)]),
    "unpermute": (lambda place, x, w: [unpermute(x, order(place), w, "triton")], [(N * K, D), (N, K)]),
    "products": (
        lambda place, x, w: [grouped_linear(x, w, place(offsets_of([2, 0, 3])), kernels="triton")], [(N, D), (E, F, D)],
    ),
    "experts": (placed_experts, [(N, D), (E, 2 * F, D), (E, D, F), (N, K)]),
    "wgrad": (
        lambda _place, dy, x, w: [
            grouped_wgrad(dy.detach(), x.detach(), offsets_of([2, 0, 3]), add_to=w.detach(), kernels="triton")
        ], [(N, F), (N, D), (E, F, D)],
    ),
    "gather": (
        lambda place, x, out, w: [
            gather(x.detach(), place(FEW), out.detach(), "triton"),
            gather_sum(out.detach(), place(SUMMED), w.detach(), "triton"),
        ], [(N, D), (3, D), (2, 2)],
    ),
    "orders": (
        lambda place: [
            getattr(sorted_ids, name)
            for sorted_ids in (expert_order(place(IDS), E, kernels="triton"), rank_order(place(IDS), 2, 2, "triton"))
            for name in INDICES
        ], [],
    ),
}  # fmt: skip


def results(name, place):
    function, shapes = OPERATORS[name]
    torch.manual_seed(1)
    inputs = [place(torch.randn(shape, device=DEVICE)).requires_grad_() for shape in shapes]
    found = function(place, *inputs)
    for y in found:
        if y.requires_grad:
            y.backward(place(torch.randn(y.shape, device=DEVICE)))
    return found + [leaf.grad for leaf in inputs if leaf.grad is not None]


def shifted(t):
    """A copy of `t` that begins one element after a multiple of 16 bytes."""
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return buffer[1:].view(t.shape).copy_(t)


@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_may_begin_anywhere(name, monkeypatch):
    monkeypatch.setattr(backend, "_copied", set())
    expected = results(name, lambda t: t)
    with pytest.warns(UserWarning, match=r"is copied for the Triton kernels in each call: it begins . bytes after"):
        assert all(map(torch.equal, results(name, shifted), expected))


# ---- Bounds ----


INDEX = torch.tensor([0, 4, 10**6, 1, 2], dtype=torch.int32)
ROWS, OFFSETS, RANKS = torch.randn(5, 8), offsets_of([2, 3]), VirtualRanks(2, 5, 8, 1, False)
KERNELS = {
    "gather_rows": lambda: permute.gather_rows(ROWS, INDEX),
    "sum_rows": lambda: permute.sum_rows(ROWS, INDEX[:, None]),
    "weight_gradients": lambda: wgrad.weight_gradients(ROWS, ROWS, OFFSETS, torch.float32, INDEX),
    "push": lambda: push.push(RANKS.each[0], operation(0), ROWS, INDEX, OFFSETS),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU need not notice: compute-sanitizer does")
@pytest.mark.parametrize("kernel", KERNELS)
def test_an_index_that_is_too_large_is_found(kernel):
    expected = rf"{kernel}_kernel: create_masked_(load|store) outside of its arguments"
    with pytest.raises(InterpreterError, match=expected):
        KERNELS[kernel]()
