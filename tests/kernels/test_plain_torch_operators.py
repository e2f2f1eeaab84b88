"""Compares the plain-torch operators with simple loops, and tests deferred weight gradients."""

import dataclasses
import itertools
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from moe_dualpipe.kernels.experts import experts
from moe_dualpipe.kernels.grouped_gemm import _grouped_mm_reference, grouped_linear, grouped_mm, grouped_wgrad
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.permute import gather_sum, permute, unpermute
from moe_dualpipe.kernels.routing import expert_order
from moe_dualpipe.kernels.weight_grads import WeightGrads, accumulate, bind

# Rows per expert, among them: empty experts at both ends, one expert with all rows, and no rows at all.
COUNTS = [[3, 1, 4, 2], [1], [0, 5, 0, 2, 0], [0, 7, 0], [300, 7], [0, 0]]


def offsets_of(counts):
    return torch.tensor([0, *counts]).cumsum(0).int()


def leaf(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


# ---- linear ----


@pytest.mark.parametrize("leading", [(), (1,), (7,), (2, 3), (0,)])
def test_linear_equals_torch(leading):
    x, w = leaf(*leading, 5), leaf(4, 5)
    y = linear(x, w)
    expected = torch.nn.functional.linear(x, w)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    direction = torch.randn_like(y)
    for ours, theirs in zip(
        torch.autograd.grad(y, [x, w], direction), torch.autograd.grad(expected, [x, w], direction), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


# ---- deferral ----


def test_deferred_gradients_run_per_key_in_any_order():
    weight_grads = WeightGrads()
    x, w = leaf(3, 5), leaf(4, 5)
    expected = torch.autograd.grad(linear(x, w).sum(), [w])[0]
    for key in ("a", "b"):
        y = linear(x, w, weight_grads)
        with weight_grads.defer_to(key):
            y.sum().backward()
    assert w.grad is None
    assert len(weight_grads) == 2
    weight_grads.run_deferred("b")
    torch.testing.assert_close(w.grad, expected)
    weight_grads.run_deferred("a")
    torch.testing.assert_close(w.grad, 2 * expected)
    assert len(weight_grads) == 0
    with pytest.raises(KeyError):
        weight_grads.run_deferred("a")


def test_the_oldest_gradients_are_computed_early_so_that_at_most_max_deferred_keys_wait():
    weight, grads, ran = leaf(2), WeightGrads(max_deferred=2), []
    for key in range(5):
        with grads.defer_to(key):
            grads.defer(weight, lambda key=key: ran.append(key) or torch.ones(2))
        assert len(grads) <= 2 and ran == [*range(key - 1)]
    for key in range(4):
        grads.run_deferred(key)  # those that were computed early are not computed again
    assert ran == [*range(4)] and weight.grad.tolist() == [4, 4]
    grads.clear()
    for key in range(5):
        with pytest.raises(KeyError):
            grads.run_deferred(key)


def test_deferral_does_not_nest_and_a_key_is_deferred_to_once():
    grads = WeightGrads()
    with grads.defer_to(1):
        assert grads.defers(leaf(2))
        with pytest.raises(RuntimeError, match="weight gradients for 2 are already being deferred"), grads.defer_to(2):
            pass
    assert not grads.defers(leaf(2))
    with pytest.raises(RuntimeError, match="weight gradients for 1 are already being deferred"), grads.defer_to(1):
        pass
    with pytest.raises(ValueError, match="max_deferred must be at least 1, or None for no bound: got 0"):
        WeightGrads(max_deferred=0)


def test_only_layers_with_the_attribute_are_bound():
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    layers[0].weight_grads, layers[1].weight_grads = None, "mine"
    bind(layers, grads := WeightGrads())
    assert [getattr(layer, "weight_grads", "nothing") for layer in layers] == [grads, "mine", "nothing"]


@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_of_an_fp32_product_of_bf16_tensors_are_rounded_to_the_dtypes_of_the_gradients_alone(deferred):
    x, w = (leaf(*shape, dtype=torch.bfloat16) for shape in ((7, 300), (5, 300)))
    w.grad_dtype = torch.float32
    a, b = (t.detach().double().requires_grad_() for t in (x, w))
    factors = torch.arange(1.0, 36).view(7, 5)
    ((a @ b.T).sin() * factors).sum().backward()
    grads = WeightGrads()
    y = linear(x, w, grads, fp32=True)
    with grads.defer_to(0) if deferred else nullcontext():
        (y.sin() * factors).sum().backward()
    if deferred:
        grads.run_deferred(0)
    assert (y.dtype, x.grad.dtype, w.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    torch.testing.assert_close(x.grad.double(), a.grad, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(w.grad.double(), b.grad, rtol=1e-4, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(linear(x.detach(), w, fp32=True), y)  # autocast does not lower its precision


def test_a_weight_with_hooks_or_a_computed_weight_is_not_deferred():
    weight_grads = WeightGrads()
    x, watched, seen = leaf(3, 5), leaf(4, 5), []
    watched.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    hooked = leaf(4, 5)
    hooked.register_hook(lambda grad: 2 * grad)
    plain = leaf(4, 5)
    with weight_grads.defer_to(0):
        for weight in (watched, hooked, plain * 3):
            linear(x, weight, weight_grads).sum().backward()
    expected = x.detach().sum(0).expand(4, 5)
    torch.testing.assert_close(seen[0], expected)
    torch.testing.assert_close(hooked.grad, 2 * expected)
    torch.testing.assert_close(plain.grad, 3 * expected)
    weight_grads.run_deferred(0)
    torch.testing.assert_close(plain.grad, 3 * expected)


def test_deferred_gradients_survive_activation_checkpointing():
    for layer, weight in (
        (lambda x, w, q: linear(x, w, q), leaf(4, 8, dtype=torch.float32)),
        (lambda x, w, q: grouped_linear(x, w, offsets_of([3, 2]), q), leaf(2, 4, 8, dtype=torch.float32)),
    ):
        x = leaf(5, 8, dtype=torch.float32)
        weight_grads = WeightGrads()
        (expected,) = torch.autograd.grad(layer(x, weight, None).tanh().sum(), weight)

        def block(value, layer=layer, weight=weight, weight_grads=weight_grads):
            return layer(value, weight, weight_grads).tanh()

        with weight_grads.defer_to(0):
            checkpoint(block, x, use_reentrant=False).sum().backward()
        weight_grads.run_deferred(0)
        torch.testing.assert_close(weight.grad, expected)


@pytest.mark.parametrize("grouped", [False, True])
def test_autocast_dtype_of_outputs_and_gradients(grouped):
    x, w = leaf(5, 8, dtype=torch.float32), leaf(2, 4, 8, dtype=torch.float32)
    weight_grads = WeightGrads()
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_linear(x, w, offsets_of([3, 2]), weight_grads) if grouped else linear(x, w[0], weight_grads)
    assert y.dtype == torch.bfloat16
    with weight_grads.defer_to(0):
        y.float().sum().backward()
    weight_grads.run_deferred(0)
    assert w.grad.dtype == x.grad.dtype == torch.float32
    rows = x.detach()[:3] if grouped else x.detach()
    torch.testing.assert_close(w.grad[0], rows.sum(0).expand(4, 8), rtol=2e-2, atol=2e-2)


def test_accumulate_follows_grad_dtype():
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    parameter.grad_dtype = torch.float32
    accumulate(parameter, lambda: torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    accumulate(parameter, lambda: torch.tensor([2**-10, 0.0], dtype=torch.bfloat16))
    assert parameter.grad.dtype == torch.float32
    assert parameter.grad.tolist() == [1 + 2**-10, 2.0]  # bf16 would have lost the small term


# ---- grouped linear ----


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("widths,dtype", [((5, 4), torch.float32), ((8, 12), torch.float32), ((8, 4), torch.float64)])
def test_grouped_linear_equals_a_loop(counts, deferred, widths, dtype):
    x, w = leaf(sum(counts), widths[0], dtype=dtype), leaf(len(counts), *widths[::-1], dtype=dtype)
    offsets = offsets_of(counts)
    weight_grads = WeightGrads()
    y = grouped_linear(x, w, offsets, weight_grads)
    expected = torch.cat([x[a:b] @ w[e].T for e, (a, b) in enumerate(itertools.pairwise(offsets))])
    torch.testing.assert_close(y, expected)
    direction = torch.randn_like(y)
    expected_x, expected_w = torch.autograd.grad(expected, [x, w], direction, allow_unused=True)
    if deferred:
        with weight_grads.defer_to(0):
            y.backward(direction)
        assert w.grad is None
        weight_grads.run_deferred(0)
    else:
        y.backward(direction)
    torch.testing.assert_close(x.grad, expected_x)
    torch.testing.assert_close(w.grad, expected_w)  # zeros for experts without rows
    for e, count in enumerate(counts):
        assert count or not w.grad[e].any()


@pytest.mark.parametrize("width", [8, 5])  # one that torch's grouped product takes, and one that it does not
def test_rows_past_the_last_offset_are_those_of_no_expert(width):
    """Only a GPU may have them: a CPU checks the offsets."""
    x, w = torch.randn(6, width), torch.randn(2, width, width)
    y = _grouped_mm_reference(x, w, torch.tensor([1, 4], dtype=torch.int32))
    assert y.shape == (6, width)
    torch.testing.assert_close(y[:4], torch.cat([x[:1] @ w[0], x[1:4] @ w[1]]))
    assert width == 8 or not y[4:].any()


@pytest.mark.parametrize("x,w,offsets,problem", [
    ((6, 5), (2, 4, 6), 3, r"got \[6, 5\] and \[2, 4, 6\]"),
    ((6,), (2, 4, 6), 3, "x .M, I. and w .E, O, I."),
    ((6, 5), (2, 4, 5), 2, r"2 experts need 3 offsets in int32: got \[2\]"),
    ((6, 5), (2, 4, 5), 3, "the last offset must be the number of rows: got 0 of 6"),
    ((6, 5), (2, 4, 5), [0, 2, 6], r"in int32: got \[3\] in torch.int64"),
])  # fmt: skip
def test_grouped_linear_rejects_wrong_shapes(x, w, offsets, problem):
    with pytest.raises(ValueError, match=problem):
        offsets = torch.tensor(offsets) if isinstance(offsets, list) else torch.zeros(offsets, dtype=torch.int32)
        grouped_linear(torch.zeros(x), torch.zeros(w), offsets)


X, W, OUT = torch.randn(6, 8), torch.randn(3, 8, 8), torch.randn(6, 8)
ONE_EACH = expert_order(torch.tensor([[0], [0], [1], [1], [2], [2]]), 3)
TAKE_OFFSETS = {
    "grouped_linear": lambda offsets: grouped_linear(X, W, offsets),
    "grouped_mm": lambda offsets: grouped_mm(X, W, offsets),
    "grouped_wgrad": lambda offsets: grouped_wgrad(OUT, X, offsets),
    "experts": lambda offsets: experts(X, W, W[:, :, :4], dataclasses.replace(ONE_EACH, expert_offsets=offsets)),
}


@pytest.mark.parametrize("name", TAKE_OFFSETS)
@pytest.mark.parametrize("offsets,problem", [
    ([0, 4, 2, 6], "offsets must not fall: expert 1 would have the rows from 4 to 2"),
    ([0, 2, -1, 6], "offsets must not fall: expert 1 would have the rows from 2 to -1"),
    ([0, 7, 7, 6], "offsets must not fall: expert 2 would have the rows from 7 to 6"),
    ([2, 2, 4, 6], "the first offset must be 0: got 2"),
    ([0, 2, 4, 7], "the last offset must be the number of rows: got 7 of 6"),
], ids=str)  # fmt: skip
def test_offsets_divide_the_rows(name, offsets, problem):
    assert torch.is_tensor(TAKE_OFFSETS[name](torch.tensor([0, 2, 2, 6], dtype=torch.int32)))
    with pytest.raises(ValueError, match=problem):
        TAKE_OFFSETS[name](torch.tensor(offsets, dtype=torch.int32))


@pytest.mark.parametrize("make", [
    lambda: torch.randn(5, 32)[:, ::4], lambda: torch.randn(1, 8).expand(5, 8), lambda: torch.randn(8, 5).T,
    lambda: torch.randn(5, 40)[:, 3:11],
])  # fmt: skip
@pytest.mark.parametrize("outputs", [1, 4, 5])
def test_grouped_linear_accepts_rows_in_any_layout(make, outputs):
    x, w, offsets = make(), torch.randn(2, outputs, 8, requires_grad=True), offsets_of([3, 2])
    y = grouped_linear(x, w, offsets)
    torch.testing.assert_close(y, torch.cat([x[:3] @ w[0].T, x[3:] @ w[1].T]))
    y.sum().backward()
    torch.testing.assert_close(w.grad[1], x[3:].sum(0).expand(outputs, 8))


# ---- expert order, permute and unpermute ----


@st.composite
def choices(draw):
    rows, columns, experts = draw(st.integers(0, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 5))
    ids = st.lists(st.integers(-1, experts - 1), min_size=columns, max_size=columns)
    return torch.tensor(draw(st.lists(ids, min_size=rows, max_size=rows)), dtype=torch.int64).view(
        rows, columns
    ), experts


def loop_order(ids, experts):
    """expert_order as a loop: for each expert, its choices in the order of rows."""
    order = [(row, k) for e in range(experts) for row, line in enumerate(ids) for k, i in enumerate(line) if i == e]
    counts = [sum(i == e for line in ids for i in line) for e in range(experts)]
    return order, counts


@settings(max_examples=80, deadline=None)
@given(choices())
def test_expert_order_equals_a_loop(drawn):
    ids_NK, experts = drawn
    expected, counts = loop_order(ids_NK.tolist(), experts)
    order = expert_order(ids_NK, experts, len(expected))
    assert order.gather_idx_M.tolist() == [row for row, _ in expected]
    assert order.choice_idx_M.tolist() == [row * ids_NK.shape[1] + k for row, k in expected]
    assert order.expert_offsets.tolist() == offsets_of(counts).tolist()
    assert order.expert_offsets.dtype == torch.int32
    for m, (row, k) in enumerate(expected):
        assert order.positions_NK[row, k] == m
    assert (order.positions_NK >= 0).sum() == len(expected)


def test_an_order_of_more_experts_than_16_bits():
    ids = torch.tensor([[40_000, 0], [32_767, 40_000]])
    assert expert_order(ids, 40_001).positions_NK.tolist() == [[2, 0], [1, 3]]
    assert expert_order(ids % 32_767, 32_767).positions_NK.tolist() == [[2, 0], [1, 3]]


@settings(max_examples=60, deadline=None)
@given(choices())
def test_permute_and_unpermute_are_each_others_backward(drawn):
    ids_NK, experts = drawn
    valid = int((ids_NK >= 0).sum())
    order = expert_order(ids_NK, experts, valid)
    x = leaf(len(ids_NK), 4)
    rows = permute(x, order)
    torch.testing.assert_close(rows, x[order.gather_idx_M], rtol=0, atol=0)
    direction = torch.randn_like(rows)
    (grad,) = torch.autograd.grad(rows, x, direction)
    expected = torch.zeros_like(x).index_add(0, order.gather_idx_M, direction)
    torch.testing.assert_close(grad, expected)

    z, w = leaf(valid, 4), torch.rand(ids_NK.shape, dtype=torch.float64, requires_grad=True)
    for weights, inputs, scaled in ((None, [z], z), (w, [z, w], z * w.flatten()[order.choice_idx_M, None])):
        y, expected = unpermute(z, order, weights), torch.zeros_like(x).index_add(0, order.gather_idx_M, scaled)
        torch.testing.assert_close(y, expected)
        direction = torch.randn_like(y)
        ours, theirs = (torch.autograd.grad(t, inputs, direction, retain_graph=True) for t in (y, expected))
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)


def test_gather_sum_of_bf16_rows_rounds_once():
    rows, weights = torch.randn(8, 16).bfloat16(), torch.rand(1, 8)
    positions = torch.arange(8)[None]
    expected = rows.float().sum(0).bfloat16()
    torch.testing.assert_close(gather_sum(rows, positions)[0], expected, rtol=0, atol=0)
    expected = (rows.float() * weights[0][:, None]).sum(0).bfloat16()
    torch.testing.assert_close(gather_sum(rows, positions, weights)[0], expected, rtol=0, atol=0)
