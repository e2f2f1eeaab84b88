"""Compares linear_cross_entropy with torch's linear and cross_entropy, and checks its memory."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from moe_dualpipe.kernels.cross_entropy import linear_cross_entropy
from moe_dualpipe.kernels.weight_grads import WeightGrads
from tests.support.tensors import OperationStats

V, D = 31, 5
# Relative error of gradients in the 2-norm: a few roundings of 2^-53, 2^-24 and 2^-9.
TOLERANCES = {torch.float64: 1e-15, torch.float32: 5e-7, torch.bfloat16: 1e-2}


def problem(tokens, dtype=torch.float64, ignored=()):
    x, w = (torch.randn(rows, D).mul(0.5).to(dtype).requires_grad_() for rows in (tokens, V))
    labels = torch.randint(V, (tokens,))
    labels[list(ignored)] = -100
    return x, w, labels


def distance(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def plain(x, w, labels):
    return F.cross_entropy(F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32)), labels)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("tokens,chunk", [(1, 1), (1, 8), (7, 1), (7, 3), (7, 7), (300, 64), (300, 299), (300, 1024)])
def test_it_equals_torch_linear_and_cross_entropy(tokens, chunk, dtype):
    x, w, labels = problem(tokens, dtype, ignored=range(2, tokens, 3))
    loss, expected = linear_cross_entropy(x, w, labels, chunk_tokens=chunk), plain(x, w, labels)
    assert loss.shape == ()
    assert loss.dtype == expected.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(loss, expected, rtol=1e-14 if dtype == torch.float64 else 1e-6, atol=0)
    ours, theirs = (torch.autograd.grad(3 * value, [x, w]) for value in (loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        assert distance(a, b) < TOLERANCES[dtype]


@pytest.mark.parametrize("tokens", [0, 4])
def test_if_all_tokens_are_ignored_the_loss_is_nan_and_gradients_are_zero(tokens):
    x, w, labels = problem(tokens, ignored=range(tokens))
    for loss in (linear_cross_entropy(x, w, labels, chunk_tokens=3), plain(x, w, labels)):
        assert loss.isnan()
        for grad, of in zip(torch.autograd.grad(loss, [x, w]), (x, w), strict=True):
            assert torch.equal(grad, torch.zeros_like(of))


def test_large_logits_do_not_overflow():
    x, w, labels = problem(7, torch.float32)
    loss, expected = (f(1e4 * x, w, labels) for f in (linear_cross_entropy, plain))
    assert expected.isfinite()
    torch.testing.assert_close(loss, expected)
    for a, b in zip(torch.autograd.grad(loss, [x, w]), torch.autograd.grad(expected, [x, w]), strict=True):
        torch.testing.assert_close(a, b)


def test_inputs_of_any_layout():
    x = torch.randn(D, 14, dtype=torch.float64)[:, ::2].T.requires_grad_()
    w = torch.randn(D, V, dtype=torch.float64).T.requires_grad_()
    labels = torch.randint(V, (7, 2))[:, 0]
    assert not (x.is_contiguous() or w.is_contiguous() or labels.is_contiguous())
    for row in (x, x[:1].expand(7, D)):
        loss, expected = linear_cross_entropy(row, w, labels, chunk_tokens=3), plain(row, w, labels)
        for a, b in zip(torch.autograd.grad(loss, [x, w]), torch.autograd.grad(expected, [x, w]), strict=True):
            torch.testing.assert_close(a, b)


# ---- weight gradient ----


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_deferred_weight_gradient_is_bit_identical(dtype):
    weight_grads = WeightGrads()
    x, w, labels = problem(300, dtype, ignored=[0, 64, 299])
    wide = w.grad_dtype = torch.promote_types(dtype, torch.float32)
    linear_cross_entropy(x, w, labels, chunk_tokens=64, weight_grads=weight_grads).backward()
    (expected_x, expected_w), x.grad, w.grad = (x.grad, w.grad), None, None
    loss = linear_cross_entropy(x, w, labels, chunk_tokens=64, weight_grads=weight_grads)
    with weight_grads.defer_to("later"):
        loss.backward()
    assert torch.equal(x.grad, expected_x)
    assert w.grad is None
    weight_grads.run_deferred("later")
    assert w.grad.dtype == expected_w.dtype == wide  # type: ignore[union-attr]
    assert torch.equal(w.grad, expected_w)


def test_deferral_with_frozen_or_computed_inputs():
    weight_grads = WeightGrads()
    x, w, labels = problem(7)
    with weight_grads.defer_to(0):
        linear_cross_entropy(x, w.detach(), labels, weight_grads=weight_grads).backward()
    assert not weight_grads.has_deferred(0)
    with weight_grads.defer_to(1):
        linear_cross_entropy(x.detach(), w, labels, weight_grads=weight_grads).backward()
    assert w.grad is None
    weight_grads.run_deferred(1)
    torch.testing.assert_close(w.grad, torch.autograd.grad(plain(x, w, labels), w)[0])
    computed = 2 * w
    with weight_grads.defer_to(2):
        linear_cross_entropy(x, computed, labels, weight_grads=weight_grads).backward()
    assert not weight_grads.has_deferred(2)


def test_the_sum_over_chunks_is_in_fp32():
    """1024 chunks of one row. A bf16 sum would stop growing when a term is less than half of its last bit."""
    x = torch.ones(1024, 1, dtype=torch.bfloat16)
    w = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    w.grad_dtype = torch.float32
    linear_cross_entropy(x, w, torch.zeros(1024, dtype=torch.int64), chunk_tokens=1).backward()
    assert w.grad.flatten().tolist() == [-0.5, 0.5]


def test_checkpointing_and_autocast():
    x, w, labels = problem(7, torch.float32)
    weight_grads = WeightGrads()
    expected = torch.autograd.grad(plain(x, w, labels), [x, w])
    with weight_grads.defer_to(0):
        checkpoint(
            lambda x: linear_cross_entropy(x.tanh(), w, labels, weight_grads=weight_grads), x, use_reentrant=False
        ).backward()  # type: ignore[union-attr]
    weight_grads.run_deferred(0)
    torch.testing.assert_close(w.grad, torch.autograd.grad(plain(x.tanh(), w, labels), w)[0])
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x.bfloat16(), w, labels)
    assert loss.dtype == torch.float32
    for grad, exact in zip(torch.autograd.grad(loss, [x, w]), expected, strict=True):
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, exact, rtol=3e-2, atol=3e-3)


# ---- memory and determinism ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_the_logits_of_one_chunk(dtype):
    tokens, chunk = 300, 64
    x, w, labels = problem(tokens, dtype)
    weight_grads = WeightGrads()
    with OperationStats() as forward:
        loss = linear_cross_entropy(x, w, labels, chunk_tokens=chunk, weight_grads=weight_grads)
    with OperationStats() as backward:
        loss.backward()
    loss = linear_cross_entropy(x, w, labels, chunk_tokens=chunk, weight_grads=weight_grads)
    with OperationStats() as inputs, weight_grads.defer_to(0):
        loss.backward()
    with OperationStats() as weights:
        weight_grads.run_deferred(0)
    for seen in (forward, backward, inputs, weights):
        assert seen.max_numel == chunk * V
    with OperationStats() as seen:
        plain(x, w, labels)
    assert seen.max_numel == tokens * V  # plain torch holds all logits


def test_it_saves_one_number_per_token():
    saved = []
    x, w, labels = problem(300)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear_cross_entropy(x, w, labels, chunk_tokens=64)
    own = [t for t in saved if t.data_ptr() not in (x.data_ptr(), w.data_ptr())]
    assert len(own) == len(saved) - 2
    assert all(t.numel() <= 300 for t in own)


# ---- errors ----


@pytest.mark.parametrize("change,message", [
    ({"x_TD": torch.zeros(2, 3, D)}, r"x \[T, D\] and w \[V, D\]: got \[2, 3, 5\] and \[31, 5\]; flatten"),
    ({"w_VD": torch.zeros(V, 4)}, r"got \[7, 5\] and \[31, 4\]"),
    ({"w_VD": torch.zeros(V)}, r"got \[7, 5\] and \[31\]"),
    ({"labels_T": torch.zeros(6, dtype=torch.int64)}, r"7 tokens need 7 labels in int64: got \[6\] in torch.int64"),
    ({"labels_T": torch.zeros(7, dtype=torch.int32)}, r"7 labels in int64: got \[7\] in torch.int32"),
    ({"w_VD": torch.zeros(V, D).double()}, "same floating-point dtype: got torch.float32 and torch.float64"),
    ({"x_TD": torch.zeros(7, D).int(), "w_VD": torch.zeros(V, D).int()}, "floating-point dtype: got torch.int32"),
    ({"w_VD": torch.zeros(V, D, device="meta")}, "on one device: got cpu, meta and cpu"),
    ({"labels_T": torch.zeros(7, dtype=torch.int64, device="meta")}, "on one device: got cpu, cpu and meta"),
    ({"chunk_tokens": 0}, "chunk_tokens must be at least 1: got 0"),
    ({"labels_T": torch.tensor([0, 30, -100, 31, 0, 0, 99])}, "from 0 to 30, or -100 to ignore a token: got 31"),
    ({"labels_T": torch.tensor([0, 30, -100, 0, -1, 0, 0])}, "got -1"),
])  # fmt: skip
def test_invalid_arguments_raise(change, message):
    good = {"x_TD": torch.zeros(7, D), "w_VD": torch.zeros(V, D), "labels_T": torch.zeros(7, dtype=torch.int64)}
    linear_cross_entropy(**good)
    with pytest.raises(ValueError, match=message):
        linear_cross_entropy(**good | change)
