"""`linear_cross_entropy`: the language-model head and its loss as one operator, which never holds all the logits.

The logits of T tokens over V words are the largest tensor of a step: 4 GiB in fp32 for 8192 tokens and 131072 words,
and a plain loss holds three of that size (logits, log-probabilities, gradient). But a token's loss is its own row's
business. So the rows are taken a chunk at a time; forward keeps one number per token, the log of the sum of the row's
exponentials (lse), and backward makes the chunk's logits again, from which d logit = exp(logit - lse) - [label]:

    x = [[1]], W = [[0], [ln 3]], label 1:   logits = [0, ln 3], lse = ln 4, loss = ln 4 - ln 3 = 0.288 nats,
                                             d logits = [1/4, 3/4] - [0, 1] = [1/4, -1/4]

The price is one more product of T x V x D, four instead of three; five where the weight gradient is put off, because
that makes the logits once more (kept, they would be the T x V that is to be avoided). Logits made again from the lse
are the idea of Cut Cross-Entropy (arXiv 2411.09009). Liger Kernel (arXiv 2410.10989) and the F.linear_cross_entropy of
newer versions of torch compute the gradients in the forward instead: three products, but the gradient of W exists from
then on, and cannot be put off.

T tokens, C tokens of a chunk, V vocabulary, D model dim.
"""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .linear import apply_autocast

if TYPE_CHECKING:
    from .weight_grads import WeightGrads

IGNORED = -100  # the label of a token that does not count, as in torch


class _LinearCrossEntropyFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        w_VD: Tensor,
        labels_T: Tensor,
        chunk_tokens: int,
        weight_grads: "WeightGrads | None",
    ) -> Tensor:
        counts_T = labels_T != IGNORED
        labels_T = labels_T.masked_fill(~counts_T, 0)
        chunks = zip(x_TD.split(chunk_tokens), labels_T.split(chunk_tokens), strict=True)
        rows = [_lse_and_chosen(x_CD, w_VD, labels_C) for x_CD, labels_C in chunks]
        lse_T, chosen_T = (torch.cat(parts) for parts in zip(*rows, strict=True))
        count = counts_T.sum()
        ctx.save_for_backward(x_TD, w_VD, labels_T, counts_T, count, lse_T)
        ctx.parameter, ctx.weight_grads, ctx.chunk_tokens = w_VD, weight_grads, chunk_tokens
        return (lse_T - chosen_T).masked_fill(~counts_T, 0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x_TD, w_VD, labels_T, counts_T, count, lse_T = ctx.saved_tensors
        scale_T = torch.where(counts_T, grads[0] / count, 0)
        gradients = partial(_gradients, x_TD, w_VD, labels_T, lse_T, scale_T, ctx.chunk_tokens)
        wants_x, wants_w, *_ = ctx.needs_input_grad
        weight_grads = ctx.weight_grads
        if wants_w and weight_grads is not None and weight_grads.defers(ctx.parameter):
            weight_grads.defer(ctx.parameter, lambda: gradients(False, True)[1])
            wants_w = False
        return *gradients(wants_x, wants_w), None, None, None


def _logits(x_CD: Tensor, w_VD: Tensor) -> Tensor:
    """In fp32 at least, and nobody else's: to be overwritten."""
    return F.linear(x_CD, w_VD).to(torch.promote_types(x_CD.dtype, torch.float32))


def _lse_and_chosen(x_CD: Tensor, w_VD: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row of logits, the log of the sum of its exponentials, [C], and the label's own logit, [C]."""
    logits_CV = _logits(x_CD, w_VD)
    return logits_CV.logsumexp(-1), logits_CV.gather(1, labels_C[:, None])[:, 0]


def _gradients(
    x_TD: Tensor,
    w_VD: Tensor,
    labels_T: Tensor,
    lse_T: Tensor,
    scale_T: Tensor,
    chunk_tokens: int,
    wants_x: bool,
    wants_w: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of x, [T, D], and of w, [V, D] in fp32 at least, as far as they are wanted."""
    if not (wants_x or wants_w):
        return None, None
    grad_x_TD = x_TD.new_empty(x_TD.shape) if wants_x else None
    grad_w_VD = w_VD.new_zeros(w_VD.shape, dtype=lse_T.dtype) if wants_w else None
    for start in range(0, len(x_TD), chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        grad_CV = _grad_logits(x_TD[rows], w_VD, labels_T[rows, None], lse_T[rows, None], scale_T[rows, None])
        if grad_x_TD is not None:
            grad_x_TD[rows] = grad_CV @ w_VD
        if grad_w_VD is not None and grad_w_VD.dtype == grad_CV.dtype:
            grad_w_VD.addmm_(grad_CV.T, x_TD[rows])
        elif grad_w_VD is not None:
            grad_w_VD += grad_CV.T @ x_TD[rows]  # rounded once a chunk, as a plain layer rounds once a backward
        del grad_CV  # before the next chunk has its own
    return grad_x_TD, grad_w_VD


def _grad_logits(x_CD: Tensor, w_VD: Tensor, labels_C1: Tensor, lse_C1: Tensor, scale_C1: Tensor) -> Tensor:
    """(exp(logits - lse) - [label]) * scale: [C, V], in the dtype of x."""
    grad_CV = _logits(x_CD, w_VD).sub_(lse_C1).exp_()
    grad_CV.scatter_(1, labels_C1, grad_CV.gather(1, labels_C1) - 1)
    return grad_CV.mul_(scale_C1).to(x_CD.dtype)


def linear_cross_entropy(
    x_TD: Tensor,
    w_VD: Tensor,
    labels_T: Tensor,
    *,
    chunk_tokens: int = 1024,
    weight_grads: "WeightGrads | None" = None,
) -> Tensor:
    """Return the mean cross-entropy of softmax(x W^T), a scalar in nats per token, in fp32 at least.

    x_TD: [T, D]; w_VD: [V, D], in the dtype of x unless autocast sees to it; labels_T: [T] int64, from 0 to V - 1, or
    -100 for a token that does not count. As in torch, the mean is over the tokens that count; where none does it is
    nan, and the gradients are zero. chunk_tokens: rows of logits that exist at a time, of 4 V bytes in fp32, and about
    as much again in passing; every chunk reads all of W, and adds to all of its gradient, so much smaller chunks move
    more memory than they compute. The numbers depend on it in the last digits only, and are the same in every run.

    The gradient of W is summed over the chunks in fp32 at least, beside the one that is there; while `weight_grads`
    defers, backward leaves it to that, with the same bits. The result cannot be differentiated twice.

    Raises ValueError for shapes, dtypes or devices that do not fit, for chunk_tokens below 1, and for a label out of
    range - on a GPU that look would be a host sync, so there the kernel's own assertion is what stops it.
    """
    x_TD, w_VD = apply_autocast(x_TD, w_VD)
    _check(x_TD, w_VD, labels_T, chunk_tokens)
    return _LinearCrossEntropyFunction.apply(x_TD, w_VD, labels_T, chunk_tokens, weight_grads)  # type: ignore[return-value]


def _check(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, chunk_tokens: int) -> None:
    if x_TD.ndim != 2 or w_VD.ndim != 2 or x_TD.shape[1] != w_VD.shape[1]:
        raise ValueError(
            f"linear_cross_entropy needs x [T, D] and w [V, D]: got {[*x_TD.shape]} and {[*w_VD.shape]}; "
            "flatten the leading dimensions of x"
        )
    if labels_T.shape != x_TD.shape[:1] or labels_T.dtype != torch.int64:
        raise ValueError(
            f"{len(x_TD)} tokens need {len(x_TD)} labels in int64: got {[*labels_T.shape]} in {labels_T.dtype}"
        )
    if x_TD.dtype != w_VD.dtype or not x_TD.is_floating_point():
        raise ValueError(
            f"x and w must have the same floating-point dtype: got {x_TD.dtype} and {w_VD.dtype}; convert one of them"
        )
    if not x_TD.device == w_VD.device == labels_T.device:
        raise ValueError(
            f"x, w and labels must be on one device: got {x_TD.device}, {w_VD.device} and {labels_T.device}"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be at least 1: got {chunk_tokens}")
    if labels_T.device.type == "cpu":
        wrong = labels_T[(labels_T != IGNORED) & ((labels_T < 0) | (labels_T >= len(w_VD)))]
        if len(wrong):
            raise ValueError(
                f"labels must be from 0 to {len(w_VD) - 1}, or {IGNORED} for a token that does not count: "
                f"got {wrong[0].item()}"
            )
