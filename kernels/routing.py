"""Routing: choose the experts of each token and their weights, and sort the choices by expert or by rank.

`route` chooses. `expert_order` sorts the choices by expert, without a loop over experts. `rank_order` sorts them by the
rank that holds the expert, and counts a token once per rank even if the rank holds several of its experts. The Triton
kernels are in gpu/routing.py.

T or N rows, E experts, K choices per row, M valid choices in total, R ranks, G groups.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .backend import aligned, check_contiguous, check_contiguous_rows, forbid_double_backward, use_triton
from .fuse import fuse, is_traced, opaque
from .options import GroupScore, Kernels, RoutingOptions, Score
from .order import ExpertOrder

# ---- choosing experts ----


def route_reference(
    logits_TE: Tensor, bias_E: Tensor | None, options: RoutingOptions, replay_TK: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    scores_TE = logits_TE.softmax(-1) if options.score == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if options.top_groups < options.num_groups:
        choice_TGP = choice_TE.unflatten(1, (options.num_groups, -1))
        counted = min(1 if options.group_score == "best" else 2, choice_TGP.shape[2])
        groups_TG = choice_TGP.topk(counted, -1).values.sum(-1)
        best_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter_(1, _top_k(groups_TG, options.top_groups), True)
        choice_TE = torch.where(best_TG[..., None], choice_TGP, -torch.inf).flatten(1)
    ids_TK = _top_k(choice_TE, options.k)
    if replay_TK is not None:
        ids_TK = torch.where(replay_TK[:, :1] < 0, ids_TK, replay_TK)
    weights_TK = scores_TE.gather(1, ids_TK)
    if options.normalize:
        # 1e-20 avoids a division by zero if all sigmoid scores underflow.
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * options.scale, ids_TK


def _top_k(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest values of each row, largest first. Unlike torch.topk, ties go to the lower index."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


class _RouteFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, options: RoutingOptions, replay_TK: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        from .gpu.routing import top_k_experts

        weights_TK, ids_TK = top_k_experts(logits_TE, bias_E, options, replay_TK)
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.options = options
        ctx.mark_non_differentiable(ids_TK)
        return weights_TK, ids_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        from .gpu.routing import top_k_experts_backward

        forbid_double_backward()
        logits_TE, ids_TK = ctx.saved_tensors
        d_weights = aligned("d weights", grads[0].contiguous())
        return top_k_experts_backward(logits_TE, ids_TK, d_weights, ctx.options), None, None, None


def route(
    logits_TE: Tensor, k: int, *, score: Score = "softmax", bias_E: Tensor | None = None, num_groups: int = 1,
    top_groups: int = 1, normalize: bool = True, scale: float = 1.0, kernels: Kernels = "auto",
    group_score: GroupScore = "best_two", compiled: bool = False, replay_TK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose k experts for each token. Return weights [T, K] in fp32 or wider and ids [T, K] in int64, best first.

    logits_TE: [T, E]. score: the function from logits to scores, "softmax" (arXiv 1701.06538) or "sigmoid".
    bias_E: [E] in fp32, added to the scores to choose experts. It is not in the weights and has no gradient (arXiv
    2408.15664). Ties go to the lower id.
    num_groups, top_groups: experts form num_groups groups of consecutive ids. Only experts in the top_groups best
    groups are eligible. group_score: the score of a group is the sum of its two best scores, as in DeepSeek-V3 (arXiv
    2412.19437), or its best score, as in V2 (arXiv 2405.04434).
    normalize, scale: the weights are the chosen scores, divided by their sum over k if `normalize`, times `scale`.
    kernels: see backend.py. compiled: fuse with torch.compile (fuse.py), where Triton is not used.
    replay_TK: ids [T, K] in int64 to take instead of the best, even from other groups; tokens whose first is -1 choose.
    Raises ValueError for invalid options or shapes.

    Example: logits [[0, 2, 1]], k=2, sigmoid: ids [[1, 2]], weights [[0.8808, 0.7311]] / 1.6119 = [[0.546, 0.454]].
    """
    options = RoutingOptions(k, score, num_groups, top_groups, normalize, scale, group_score)
    if logits_TE.ndim != 2:
        raise ValueError(f"route needs logits [T, E]: got {[*logits_TE.shape]}")
    options.check(logits_TE.shape[1])
    if bias_E is not None and bias_E.shape != logits_TE.shape[1:]:
        raise ValueError(f"bias_E must be [{logits_TE.shape[1]}], one per expert: got {[*bias_E.shape]}")
    if replay_TK is not None and replay_TK.shape != (len(logits_TE), k):
        raise ValueError(f"replay_TK must be {[len(logits_TE), k]}, ids for each token: got {[*replay_TK.shape]}")
    if not use_triton(kernels, logits_TE, bias_E):
        return fuse(route_reference, compiled)(logits_TE, bias_E, options, replay_TK)
    bias_E = None if bias_E is None else aligned("bias_E", check_contiguous("bias_E", bias_E.detach()))
    return _RouteFunction.apply(check_contiguous_rows("logits_TE", logits_TE), bias_E, options, replay_TK)  # type: ignore[return-value]


# ---- sorting choices by expert or rank ----


def expert_order(
    expert_ids_NK: Tensor, num_experts: int, num_choices: int | None = None, kernels: Kernels = "auto",
    check_ids: bool = True,
) -> ExpertOrder:  # fmt: skip
    """Sort choices by expert. See ExpertOrder for the result and an example.

    expert_ids_NK: [N, K] integers; -1 is an invalid choice. num_choices: M, the number of valid choices or more; None:
    all are valid. It is not checked, because counting would be a host sync. kernels: see backend.py.
    check_ids: raise ValueError for ids of num_experts or more, and for ids below -1 (below 0 if num_choices is None).
    On a GPU, a device-side assertion fails instead, which needs no host sync.
    """
    if expert_ids_NK.ndim != 2 or expert_ids_NK.is_floating_point():
        raise ValueError(f"expert ids must be [N, K] integers: got {[*expert_ids_NK.shape]} in {expert_ids_NK.dtype}")
    if num_experts < 1:
        raise ValueError(f"num_experts must be at least 1: got {num_experts}")
    if expert_ids_NK.numel() >= 1 << 31:
        raise ValueError(f"an order has indices in int32: got {expert_ids_NK.numel():,} choices")
    lowest = (0 if num_choices is None else -1) if check_ids else None
    num_choices = expert_ids_NK.numel() if num_choices is None else num_choices
    triton = use_triton(kernels, expert_ids_NK)
    traced = is_traced(expert_ids_NK)  # without values
    if lowest is not None and not traced and not (triton and expert_ids_NK.is_cuda):  # there, the kernel checks them
        _check_ids(expert_ids_NK, lowest, num_experts)
    if triton:
        from .gpu.configs import tile_heights
        from .gpu.launch_args import arch_of
        from .gpu.sorting import order_by_expert

        heights = tile_heights(arch_of(expert_ids_NK.device))
        ids_NK = aligned("expert ids", expert_ids_NK.contiguous())
        return order_by_expert(ids_NK, num_experts, num_choices, lowest=lowest, heights=heights)
    return ExpertOrder(*_sort_by_key(expert_ids_NK, expert_ids_NK >= 0, num_experts, num_choices))


def rank_order(ids_TK: Tensor, experts_per_rank: int, num_ranks: int, kernels: Kernels = "auto") -> ExpertOrder:
    """Sort tokens by destination rank. A token appears once per rank that holds any of its experts.

    Rank r holds the ids from r * experts_per_rank; -1 is an invalid choice. The result is an ExpertOrder with ranks in
    place of experts. The number of rows, expert_offsets[R], is known only on the device. The indices have the largest
    possible length, T x min(K, R).

    Example: ids [[0, 1], [1, 3]] with 2 experts on each of 2 ranks: token 0 goes to rank 0, token 1 to both ranks, so
    gather_idx [0, 1, 1, .], positions [[0, -1], [1, 2]], expert_offsets [0, 2, 3].
    """
    max_choices = len(ids_TK) * min(ids_TK.shape[1], num_ranks)
    if use_triton(kernels, ids_TK):
        from .gpu.sorting import order_by_expert

        ids_TK = aligned("expert ids", ids_TK.contiguous())
        return order_by_expert(ids_TK, num_ranks, max_choices, experts_per_rank, once=True)
    ranks_TK = ids_TK // experts_per_rank
    repeated_TK = (ranks_TK[:, :, None] == ranks_TK[:, None, :]).tril(-1).any(-1)
    return ExpertOrder(*_sort_by_key(ranks_TK, (ids_TK >= 0) & ~repeated_TK, num_ranks, max_choices))


def _like_order(
    keys_NK: Tensor, _: Tensor, num_keys: int, max_choices: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    empty = partial(keys_NK.new_empty, dtype=torch.int32)
    return empty(max_choices), empty(max_choices), empty(keys_NK.shape), empty(num_keys + 1)


@opaque(_like_order)
def _sort_by_key(
    keys_NK: Tensor, valid_NK: Tensor, num_keys: int, max_choices: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The tensors of the order of the first max_choices choices, with `valid_NK` first."""
    # Invalid choices sort after all keys.
    keys_M, choice_idx_M = _stable_sort(torch.where(valid_NK, keys_NK, num_keys).flatten(), num_keys)
    keys_M, choice_idx_M = keys_M[:max_choices], choice_idx_M[:max_choices]
    positions_M = torch.arange(len(keys_M), dtype=torch.int32, device=keys_M.device)
    positions_NK = torch.full_like(keys_NK, -1, dtype=torch.int32, memory_format=torch.contiguous_format)
    positions_NK.view(-1).scatter_(0, choice_idx_M, positions_M.masked_fill_(keys_M == num_keys, -1))
    # Key e starts after the keys below e.
    first_keys = torch.arange(num_keys + 1, dtype=keys_M.dtype, device=keys_M.device)
    offsets = torch.searchsorted(keys_M, first_keys, out_int32=True)
    choice_idx_M = choice_idx_M.int()
    return choice_idx_M // max(keys_NK.shape[1], 1), choice_idx_M, positions_NK, offsets


def _stable_sort(keys: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Sorted keys from 0 to `largest`, and their indices in int64."""
    if keys.device.type != "cpu" or largest >= 1 << 15:
        return keys.sort(stable=True)
    # On a CPU, numpy sorts 16-bit integers by radix, in less than half of torch's time.
    keys = keys.to(torch.int16)
    indices = torch.empty(len(keys), dtype=torch.int64)
    indices.numpy()[:] = keys.numpy().argsort(kind="stable")
    return keys.index_select(0, indices), indices


def count_choices(ids_TK: Tensor, num_experts: int) -> int | None:
    """The number of choices that are not -1, which means "no expert".

    None, without a check, on a GPU, where counting is a host sync, and while torch.compile traces. Otherwise raises
    ValueError for ids below -1 and for ids of num_experts or more.

    Example: ids [[0, 2], [-1, 1]] and 3 experts -> 3.
    """
    if ids_TK.device.type != "cpu" or is_traced(ids_TK):
        return None
    if not ids_TK.numel():
        return 0
    low, high = map(int, ids_TK.aminmax())
    if low < -1 or high >= num_experts:
        token, choice = ((ids_TK < -1) | (ids_TK >= num_experts)).nonzero()[0].tolist()
        raise ValueError(
            f"expert ids must be from 0 to {num_experts - 1}, or -1 for no expert: "
            f"got {int(ids_TK[token, choice])} for token {token}"
        )
    return ids_TK.numel() if low >= 0 else int((ids_TK >= 0).sum())


def _check_ids(ids: Tensor, lowest: int, num_experts: int) -> None:
    if not ids.numel():
        return
    if ids.is_cuda:
        in_range = ((ids >= lowest) & (ids < num_experts)).all()
        torch._assert_async(in_range, f"expert ids outside {lowest} to {num_experts - 1}")
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < lowest or high >= num_experts:
        problem = f"expert ids must be from {lowest} to {num_experts - 1}: got {low} to {high}"
        if lowest == 0 and low == -1:
            problem += "; if -1 marks invalid choices, pass num_choices, the number of valid ones"
        raise ValueError(problem)
