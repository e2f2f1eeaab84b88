"""Routing in Triton: choose the experts of each token and their weights, in one kernel forward and one backward.

T tokens, E experts, G groups of experts, K experts per token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..options import RoutingOptions
from .launch_args import ceil_div, next_power_of_2


@triton.jit
def _scores(logits, t, STRIDE: tl.constexpr, T, e, exists, SOFTMAX: tl.constexpr):
    """Scores [tokens, columns] of the experts e. Columns without an expert have score 0."""
    mask = (t < T)[:, None] & exists[None, :]
    values = tl.load(logits + t.to(tl.int64)[:, None] * STRIDE + e[None, :], mask=mask, other=float("-inf"))
    values = values.to(tl.float32)
    if SOFTMAX:
        values = tl.where((t < T)[:, None], values, 0.0)
        values = tl.exp(values - tl.max(values, 1)[:, None])
        values = values / tl.sum(values, 1)[:, None]
    else:
        values = tl.sigmoid(values)
    return values


@triton.jit
def _mask_groups(choice, column, G_PADDED: tl.constexpr, PER_GROUP: tl.constexpr, PADDED: tl.constexpr,
                 TOP_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Mask experts outside the best groups with -inf. The score of a group: its best score, or the sum of two."""
    in_groups = tl.reshape(choice, (BLOCK_T, G_PADDED, PADDED))
    group_score = tl.max(in_groups, 2)
    if BEST_TWO and PER_GROUP > 1:
        winner = tl.argmax(in_groups, 2)
        others = tl.where(tl.arange(0, PADDED)[None, None, :] == winner[:, :, None], float("-inf"), in_groups)
        group_score += tl.max(others, 2)
    eligible = tl.full((BLOCK_T, G_PADDED * PADDED), False, tl.int1)
    group = tl.arange(0, G_PADDED)
    for _ in range(TOP_GROUPS):
        best = tl.argmax(group_score, 1)
        eligible = eligible | ((column // PADDED)[None, :] == best[:, None])
        group_score = tl.where(group[None, :] == best[:, None], float("-inf"), group_score)
    return tl.where(eligible, choice, float("-inf"))


@triton.jit(do_not_specialize=["T"])
def top_k_experts_kernel(
    logits, bias, replay, weights, ids, T, scale, STRIDE: tl.constexpr, K: tl.constexpr, K_PADDED: tl.constexpr,
    G: tl.constexpr, G_PADDED: tl.constexpr, PER_GROUP: tl.constexpr, PADDED: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr, BIASED: tl.constexpr, NORMALIZE: tl.constexpr, BEST_TWO: tl.constexpr,
    REPLAY: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    # Both the columns of a group and the number of groups are padded to powers of two; ids stay in ascending order.
    column = tl.arange(0, G_PADDED * PADDED)
    e = column // PADDED * PER_GROUP + column % PADDED
    exists = (column % PADDED < PER_GROUP) & (column // PADDED < G)
    scores = _scores(logits, t, STRIDE, T, e, exists, SOFTMAX)
    choice = scores
    if BIASED:
        choice += tl.load(bias + e, mask=exists, other=0.0)[None, :]
    # NaN and -inf become the lowest finite score, so that ids are valid and distinct for any logits.
    choice = tl.where(choice > -1e38, choice, -1e38)
    choice = tl.where(exists[None, :], choice, float("-inf"))
    if TOP_GROUPS < G:
        choice = _mask_groups(choice, column, G_PADDED, PER_GROUP, PADDED, TOP_GROUPS, BEST_TWO, BLOCK_T)
    ks = tl.arange(0, K_PADDED)
    chosen = tl.zeros((BLOCK_T, K_PADDED), tl.float32)
    for k in range(K):
        best = tl.argmax(choice, 1)  # on a tie the lower id
        if REPLAY:
            first = tl.load(replay + t.to(tl.int64) * K, mask=t < T, other=-1)
            given = tl.load(replay + t.to(tl.int64) * K + k, mask=t < T, other=0)
            best = tl.where(first < 0, best, (given // PER_GROUP * PADDED + given % PER_GROUP).to(tl.int32))
        is_best = column[None, :] == best[:, None]
        value = tl.sum(tl.where(is_best, scores, 0.0), 1)
        chosen = tl.where(ks[None, :] == k, value[:, None], chosen)
        choice = tl.where(is_best, float("-inf"), choice)
        expert = best // PADDED * PER_GROUP + best % PADDED
        tl.store(ids + t.to(tl.int64) * K + k, expert.to(tl.int64), mask=t < T)
    if NORMALIZE:
        chosen = chosen / (tl.sum(chosen, 1)[:, None] + 1e-20)
    inside = (t < T)[:, None] & (ks < K)[None, :]
    tl.store(weights + t.to(tl.int64)[:, None] * K + ks[None, :], chosen * scale, mask=inside)


@triton.jit(do_not_specialize=["T"])
def top_k_experts_backward_kernel(
    logits, ids, dweights, dlogits, T, scale, STRIDE: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    E_PADDED: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = t < T
    e = tl.arange(0, E_PADDED)
    scores = _scores(logits, t, STRIDE, T, e, e < E, SOFTMAX)
    first = t.to(tl.int64) * K
    total = tl.zeros((BLOCK_T,), tl.float32) + 1e-20
    dot = tl.zeros((BLOCK_T,), tl.float32)
    if NORMALIZE:
        for k in range(K):
            is_chosen = e[None, :] == tl.load(ids + first + k, mask=inside, other=0)[:, None]
            s = tl.sum(tl.where(is_chosen, scores, 0.0), 1)
            total += s
            dot += s * tl.load(dweights + first + k, mask=inside, other=0.0)
    dscores = tl.zeros((BLOCK_T, E_PADDED), tl.float32)
    for k in range(K):
        is_chosen = e[None, :] == tl.load(ids + first + k, mask=inside, other=0)[:, None]
        ds = tl.load(dweights + first + k, mask=inside, other=0.0)
        if NORMALIZE:
            ds = (ds - dot / total) / total
        dscores += tl.where(is_chosen, (ds * scale)[:, None], 0.0)
    if SOFTMAX:
        dscores = scores * (dscores - tl.sum(dscores * scores, 1)[:, None])
    else:
        dscores = dscores * scores * (1 - scores)
    pointers = dlogits + t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(pointers, dscores.to(dlogits.dtype.element_ty), mask=inside[:, None] & (e < E)[None, :])


def _block_t(columns: int) -> int:
    return max(1, min(64, 2048 // columns))


def top_k_experts(
    logits: Tensor, bias: Tensor | None, options: RoutingOptions, replay: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return weights [T, K] in fp32 and ids [T, K] in int64 from logits [T, E] with contiguous rows.

    replay: contiguous ids [T, K] in int64 to take, for tokens whose first is not negative.
    """
    (num_tokens, num_experts), k, groups = logits.shape, options.k, options.num_groups
    weights = torch.empty(num_tokens, k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_tokens, k, dtype=torch.int64, device=logits.device)
    per_group = num_experts // groups
    padded, groups_padded = next_power_of_2(per_group), next_power_of_2(groups)
    block_t = _block_t(padded * groups_padded)
    if num_tokens:
        top_k_experts_kernel[(ceil_div(num_tokens, block_t),)](
            logits, bias, replay, weights, ids, num_tokens, options.scale, logits.stride(0), k, next_power_of_2(k),
            groups, groups_padded, per_group, padded, options.top_groups, options.score == "softmax", bias is not None,
            options.normalize, options.group_score == "best_two", replay is not None, block_t,
        )  # fmt: skip
    return weights, ids


def top_k_experts_backward(logits: Tensor, ids: Tensor, dweights: Tensor, options: RoutingOptions) -> Tensor:
    """Return the gradient of the logits, [T, E], from the contiguous gradient of the weights, [T, K]."""
    num_tokens, num_experts = logits.shape
    dlogits = torch.empty(num_tokens, num_experts, dtype=logits.dtype, device=logits.device)
    padded = next_power_of_2(num_experts)
    block_t = _block_t(padded)
    if num_tokens:
        top_k_experts_backward_kernel[(ceil_div(num_tokens, block_t),)](
            logits, ids, dweights, dlogits, num_tokens, options.scale, logits.stride(0), ids.shape[1], num_experts,
            padded, options.score == "softmax", options.normalize, block_t,
        )  # fmt: skip
    return dlogits
