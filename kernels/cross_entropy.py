"""`linear_cross_entropy`: the language-model head and its loss as one operator that never holds all logits.

The logits of T tokens over V words are the largest tensor of a step: 4 GiB in fp32 for 8192 tokens and 131072 words. A
plain loss holds three tensors of that size (logits, log-probabilities, gradient). But the loss of a token depends only
on its row, so rows are processed in chunks. Forward saves one number per token, the log-sum-exp of the row (lse).
Backward recomputes the logits of a chunk, and d logit = exp(logit - lse) - [label]:

    x = [[1]], W = [[0], [ln 3]], label 1:   logits = [0, ln 3], lse = ln 4, loss = ln 4 - ln 3 = 0.288 nats,
                                             d logits = [1/4, 3/4] - [0, 1] = [1/4, -1/4]

The cost is one more product of T x V x D: four instead of three. A deferred weight gradient recomputes the logits once
more, which makes five. The method is that of Cut Cross-Entropy (arXiv 2411.09009). Liger Kernel (arXiv 2410.10989) and
F.linear_cross_entropy of newer torch versions compute the gradients in the forward instead. That takes three products,
but the gradient of W occupies memory from the forward on and cannot be deferred.

T tokens, C tokens in a chunk, V vocabulary, D model dim.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .backend import forbid_double_backward
from .linear import apply_autocast
from .products import chosen_library
from .weight_grads import WeightGrads

IGNORED = -100  # label of a token to ignore, as in torch


class _LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, chunk_tokens: int, weight_grads: WeightGrads | None
    ) -> Tensor:
        valid_T = labels_T != IGNORED
        labels_T = labels_T.masked_fill(~valid_T, 0)
        chunks = zip(x_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
        rows = [_lse_and_label_logit(x_CD, w_VD, labels_C) for x_CD, labels_C in chunks]
        lse_T, label_logits_T = (torch.cat(parts) for parts in zip(*rows, strict=True))
        count = valid_T.sum()
        ctx.save_for_backward(x_TD, w_VD, labels_T, valid_T, count, lse_T)
        ctx.parameter, ctx.weight_grads, ctx.chunk_tokens = w_VD, weight_grads, chunk_tokens
        return (lse_T - label_logits_T).masked_fill(~valid_T, 0).sum() / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        forbid_double_backward("linear_cross_entropy", "use F.cross_entropy of the logits")
        x_TD, w_VD, labels_T, valid_T, count, lse_T = ctx.saved_tensors
        scale_T = torch.where(valid_T, grads[0] / count, 0)
        gradients = partial(_gradients, x_TD, w_VD, labels_T, lse_T, scale_T, ctx.chunk_tokens)
        wants_x, wants_w, *_ = ctx.needs_input_grad
        weight_grads = ctx.weight_grads
        if wants_w and weight_grads is not None and weight_grads.defers(ctx.parameter):
            weight_grads.defer(ctx.parameter, lambda: gradients(False, True)[1])
            wants_w = False
        return *gradients(wants_x, wants_w), None, None, None


def _logits(x_CD: Tensor, w_VD: Tensor) -> Tensor:
    """Logits in fp32 or wider, in a new tensor that the caller may overwrite."""
    with chosen_library(x_CD, len(w_VD)):
        return F.linear(x_CD, w_VD).to(torch.promote_types(x_CD.dtype, torch.float32))


def _lse_and_label_logit(x_CD: Tensor, w_VD: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log-sum-exp of each row of logits, [C], and the logit of its label, [C]."""
    logits_CV = _logits(x_CD, w_VD)
    return logits_CV.logsumexp(-1), logits_CV.gather(1, labels_C[:, None])[:, 0]


def _gradients(
    x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, lse_T: Tensor, scale_T: Tensor, chunk_tokens: int,
    wants_x: bool, wants_w: bool,
) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
    """Return the gradients of x, [T, D], and of w, [V, D] in fp32 or wider; None if not wanted."""
    if not (wants_x or wants_w):
        return None, None
    grad_x_TD = x_TD.new_empty(x_TD.shape) if wants_x else None
    grad_w_VD = w_VD.new_zeros(w_VD.shape, dtype=lse_T.dtype) if wants_w else None
    for start in range(0, len(x_TD), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        grad_CV = _grad_logits(x_TD[rows], w_VD, labels_T[rows, None], lse_T[rows, None], scale_T[rows, None])
        with chosen_library(grad_CV, w_VD.shape[1]):
            if grad_x_TD is not None:
                torch.mm(grad_CV, w_VD, out=grad_x_TD[rows])
            if grad_w_VD is not None and grad_w_VD.dtype == grad_CV.dtype:
                grad_w_VD.addmm_(grad_CV.T, x_TD[rows])
            elif grad_w_VD is not None:
                grad_w_VD += grad_CV.T @ x_TD[rows]  # rounded to the dtype of x once per chunk
        del grad_CV  # free it before the next chunk is allocated
    return grad_x_TD, grad_w_VD


def _grad_logits(x_CD: Tensor, w_VD: Tensor, labels_C1: Tensor, lse_C1: Tensor, scale_C1: Tensor) -> Tensor:
    """Return (exp(logits - lse) - [label]) * scale, [C, V], in the dtype of x."""
    grad_CV = _logits(x_CD, w_VD).sub_(lse_C1).exp_()
    grad_CV.scatter_(1, labels_C1, grad_CV.gather(1, labels_C1) - 1)
    return grad_CV.mul_(scale_C1).to(x_CD.dtype)


def linear_cross_entropy(
    x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, *, chunk_tokens: int = 1024, weight_grads: WeightGrads | None = None
) -> Tensor:
    """Return the mean cross-entropy of softmax(x W^T), a scalar in nats per token, in fp32 or wider.

    x_TD: [T, D]. w_VD: [V, D], in the dtype of x unless autocast is enabled. labels_T: [T] int64, from 0 to V - 1, or
    -100 to ignore a token. As in torch, the mean is over tokens that are not ignored. If all are, the loss is nan and
    the gradients are zero.
    chunk_tokens: number of rows of logits in memory at a time. A row takes 4 V bytes in fp32, and temporarily about
    twice that. Each chunk reads W and updates the whole gradient of W, so small chunks are bound by memory bandwidth.
    Results for different chunk_tokens differ only by rounding. Every run has the same result.
    weight_grads: defers the gradient of W during a split backward, with bit-identical results; None: never deferred.
    The gradient of W is summed over chunks in fp32 or wider, in a separate tensor. The result cannot be differentiated
    twice.
    Raises ValueError if shapes, dtypes or devices do not match, for chunk_tokens below 1, and on a CPU for labels out
    of range. On a GPU, where that check would be a host sync, torch's device-side assertion fails instead.
    """
    x_TD, w_VD = apply_autocast(x_TD, w_VD)
    _check(x_TD, w_VD, labels_T, chunk_tokens)
    return _LinearCrossEntropyFunction.apply(x_TD, w_VD, labels_T, chunk_tokens, weight_grads)  # type: ignore[return-value]


def _check(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, chunk_tokens: int) -> None:
    if x_TD.ndim != 2 or w_VD.ndim != 2 or x_TD.shape[1] != w_VD.shape[1]:
        got = f"{[*x_TD.shape]} and {[*w_VD.shape]}; flatten the leading dimensions of x"
        raise ValueError(f"linear_cross_entropy needs x [T, D] and w [V, D]: got {got}")
    if labels_T.shape != x_TD.shape[:1] or labels_T.dtype != torch.int64:
        got = f"{[*labels_T.shape]} in {labels_T.dtype}"
        raise ValueError(f"{len(x_TD)} tokens need {len(x_TD)} labels in int64: got {got}")
    if x_TD.dtype != w_VD.dtype or not x_TD.is_floating_point():
        got = f"{x_TD.dtype} and {w_VD.dtype}; convert one of them"
        raise ValueError(f"x and w must have the same floating-point dtype: got {got}")
    if not x_TD.device == w_VD.device == labels_T.device:
        got = f"{x_TD.device}, {w_VD.device} and {labels_T.device}"
        raise ValueError(f"x, w and labels must be on one device: got {got}")
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1: got {chunk_tokens}")
    if labels_T.device.type == "cpu":
        wrong = labels_T[(labels_T != IGNORED) & ((labels_T < 0) | (labels_T >= len(w_VD)))]
        if len(wrong):
            allowed = f"from 0 to {len(w_VD) - 1}, or {IGNORED} to ignore a token"
            raise ValueError(f"labels must be {allowed}: got {wrong[0].item()}")
