"""Compares linear_cross_entropy with torch's linear and cross_entropy, and checks its memory."""

from contextlib import nullcontext

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


def problem(tokens, dtype=torch.float64, ignored=(), scale=0.5):
    x, w = (torch.randn(rows, D).mul(scale).to(dtype).requires_grad_() for rows in (tokens, V))
    labels = torch.randint(V, (tokens,))
    labels[list(ignored)] = -100
    return x, w, labels


def plain(x, w, labels):
    return F.cross_entropy(F.linear(x, w).to(torch.promote_types(x.dtype, torch.float32)), labels)


CASES = {
    **{
        f"{tokens} in chunks of {chunk}": (lambda tokens=tokens: problem(tokens, ignored=range(2, tokens, 3)), chunk)
        for tokens, chunk in ((1, 1), (1, 8), (7, 1), (7, 3), (7, 7), (300, 64), (300, 299), (300, 1024))
    },
    "no tokens": (lambda: problem(0), 3),  # as where all are ignored, the loss is NaN and gradients are zero
    "all ignored": (lambda: problem(4, ignored=range(4)), 3),
    "large logits": (lambda: problem(7, scale=1e4), 3),
    "any layout": (lambda: (torch.randn(D, 14)[:, ::2].T, torch.randn(D, V).T, torch.randint(V, (7, 2))[:, 0]), 3),
    "the same row": (lambda: (torch.randn(1, D).expand(7, D), torch.randn(V, D), torch.randint(V, (7,))), 3),
}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_it_equals_torch_linear_and_cross_entropy(case, dtype):
    (x, w, labels), chunk = CASES[case][0](), CASES[case][1]
    x, w = (t.to(dtype).detach().requires_grad_() for t in (x, w))
    loss, expected = linear_cross_entropy(x, w, labels, chunk_tokens=chunk), plain(x, w, labels)
    assert loss.dtype == expected.dtype == torch.promote_types(dtype, torch.float32)
    rtol = 1e-14 if dtype == torch.float64 else 1e-6
    torch.testing.assert_close(loss, expected, rtol=rtol, atol=0, equal_nan=True)
    ours, theirs = (torch.autograd.grad(3 * value, [x, w]) for value in (loss, expected))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype and (a.double() - b.double()).norm() <= TOLERANCES[dtype] * b.double().norm()


# ---- weight gradient ----


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_the_deferred_weight_gradient_is_bit_identical(dtype):
    x, w, labels = problem(300, dtype, ignored=[0, 64, 299])
    w.grad_dtype, grads = torch.promote_types(dtype, torch.float32), []
    for deferred in (False, True):
        weight_grads, x.grad, w.grad = WeightGrads(), None, None
        with weight_grads.defer_to("later") if deferred else nullcontext():
            loss = lambda x: linear_cross_entropy(x, w, labels, chunk_tokens=64, weight_grads=weight_grads)  # noqa: B023, E731
            checkpoint(loss, x, use_reentrant=False).backward()  # type: ignore[union-attr]
        if deferred:
            assert w.grad is None
            weight_grads.run_deferred("later")
        grads.append((x.grad, w.grad))
    assert grads[0][1].dtype == w.grad_dtype and all(map(torch.equal, *grads))


def test_the_sum_over_chunks_is_in_fp32():
    """1024 chunks of one row. A bf16 sum would stop growing when a term is less than half of its last bit."""
    x = torch.ones(1024, 1, dtype=torch.bfloat16)
    w = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    w.grad_dtype = torch.float32
    linear_cross_entropy(x, w, torch.zeros(1024, dtype=torch.int64), chunk_tokens=1).backward()
    assert w.grad.flatten().tolist() == [-0.5, 0.5]


def test_autocast_does_not_lower_the_precision_of_the_loss():
    x, w, labels = problem(7, torch.float32)
    expected = torch.autograd.grad(plain(x, w, labels), [x, w])
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(x.bfloat16(), w, labels)
    found = torch.autograd.grad(loss, [x, w])
    assert [t.dtype for t in (loss, *found)] == [torch.float32] * 3
    torch.testing.assert_close(found, expected, rtol=3e-2, atol=3e-3)


# ---- memory and determinism ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_tensor_is_larger_than_the_logits_of_one_chunk(dtype):
    weight_grads, (x, w, labels) = WeightGrads(), problem(300, dtype)
    with OperationStats() as seen:
        for deferred in (False, True):
            loss = linear_cross_entropy(x, w, labels, chunk_tokens=64, weight_grads=weight_grads)
            with weight_grads.defer_to(0) if deferred else nullcontext():
                loss.backward()
        weight_grads.run_deferred(0)
    with OperationStats() as of_torch:
        plain(x, w, labels)
    assert (seen.max_numel, of_torch.max_numel) == (64 * V, 300 * V)
