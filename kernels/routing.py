"""Routing: which experts each token goes to and with what weight, and the order of what each expert gets.

`route` is the decision, `expert_order` its consequence: the choices in expert-major order, without a loop over experts.
`rank_order` is the same for the ranks that hold the experts, to which a token goes once however many of its experts
live there.

The plain-torch operators are below; the Triton kernels are in gpu/routing.py.

T or N rows, E experts, K choices a row, M valid choices in total, R ranks, G groups.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from .backend import Kernels, check_contiguous, check_contiguous_rows, forbid_double_backward, use_triton

Score = Literal["softmax", "sigmoid"]

# ---- the decision ----


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How logits become choices; `route` says what the fields mean."""

    k: int
    score: Score = "softmax"
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = True
    scale: float = 1.0

    def check(self, num_experts: int) -> None:
        """Raises ValueError for numbers that contradict each other."""
        if self.score not in ("softmax", "sigmoid"):
            raise ValueError(f"score must be softmax or sigmoid: got {self.score!r}")
        if self.num_groups < 1 or num_experts % self.num_groups:
            raise ValueError(f"{num_experts} experts cannot be divided evenly into {self.num_groups} groups")
        if not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(f"top_groups must be from 1 to {self.num_groups} groups: got {self.top_groups}")
        eligible = num_experts // self.num_groups * self.top_groups
        if not 1 <= self.k <= eligible:
            raise ValueError(f"k must be from 1 to the {eligible} experts that can be chosen: got {self.k}")


def route_reference(logits_TE: Tensor, bias_E: Tensor | None, options: RoutingOptions) -> tuple[Tensor, Tensor]:
    logits_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    scores_TE = logits_TE.softmax(-1) if options.score == "softmax" else logits_TE.sigmoid()
    choice_TE = scores_TE.detach() if bias_E is None else scores_TE.detach() + bias_E
    if options.top_groups < options.num_groups:
        choice_TGP = choice_TE.unflatten(1, (options.num_groups, -1))
        groups_TG = choice_TGP.topk(min(2, choice_TGP.shape[2]), -1).values.sum(-1)
        kept_TG = torch.zeros_like(groups_TG, dtype=torch.bool).scatter_(1, _top_k(groups_TG, options.top_groups), True)
        choice_TE = torch.where(kept_TG[..., None], choice_TGP, -torch.inf).flatten(1)
    ids_TK = _top_k(choice_TE, options.k)
    weights_TK = scores_TE.gather(1, ids_TK)
    if options.normalize:
        # The guard is for sigmoid scores that have all underflowed to zero.
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * options.scale, ids_TK


def _top_k(values: Tensor, k: int) -> Tensor:
    """The k largest of each row, best first; of equals the first, which torch's topk does not promise."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :k]


class _RouteFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_TE: Tensor, bias_E: Tensor | None, options: RoutingOptions) -> tuple[Tensor, Tensor]:
        from .gpu.routing import top_k_experts

        weights_TK, ids_TK = top_k_experts(
            logits_TE, bias_E, options.k, options.num_groups, options.top_groups, options.score == "softmax",
            options.normalize, options.scale,
        )  # fmt: skip
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.options = options
        ctx.mark_non_differentiable(ids_TK)
        return weights_TK, ids_TK

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        from .gpu.routing import top_k_experts_backward

        forbid_double_backward()
        logits_TE, ids_TK = ctx.saved_tensors
        options: RoutingOptions = ctx.options
        softmax = options.score == "softmax"
        return (
            top_k_experts_backward(logits_TE, ids_TK, grads[0].contiguous(), softmax, options.normalize, options.scale),
            None,
            None,
        )


def route(
    logits_TE: Tensor,
    k: int,
    *,
    score: Score = "softmax",
    bias_E: Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
    kernels: Kernels = "auto",
) -> tuple[Tensor, Tensor]:
    """Choose k experts for each token: weights [T, K] in fp32 (at least), ids [T, K] in int64, best first.

    logits_TE: [T, E]. Experts are chosen by their score, softmax (arXiv 1701.06538) or sigmoid, plus `bias_E`, [E] in
    fp32, which has no gradient and no part in the weights (arXiv 2408.15664). Of num_groups groups of consecutive
    experts only the top_groups best are eligible, each as good as its two best experts together (arXiv 2412.19437).
    Equal scores go to the smaller id. The weights are the scores, divided by their sum over k (normalize), times
    `scale`. kernels: see backend.py. Raises ValueError for numbers that contradict each other.

    Example: logits [[0, 2, 1]], k=2, sigmoid: ids [[1, 2]], weights [[0.8808, 0.7311]] / 1.6119 = [[0.546, 0.454]].
    """
    options = RoutingOptions(k, score, num_groups, top_groups, normalize, scale)
    if logits_TE.ndim != 2:
        raise ValueError(f"route needs logits [T, E]: got {[*logits_TE.shape]}")
    options.check(logits_TE.shape[1])
    if bias_E is not None and bias_E.shape != logits_TE.shape[1:]:
        raise ValueError(f"{logits_TE.shape[1]} experts need as many biases: got {[*bias_E.shape]}")
    if not use_triton(kernels, logits_TE, bias_E):
        return route_reference(logits_TE, bias_E, options)
    bias_E = None if bias_E is None else check_contiguous("bias_E", bias_E.detach())
    return _RouteFunction.apply(check_contiguous_rows("logits_TE", logits_TE), bias_E, options)  # type: ignore[return-value]


# ---- its consequence ----


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The valid choices of N rows, sorted by expert; within an expert by row (the sort is stable).

    gather_idx_M: the row that each position of the order takes.
    choice_idx_M: the choice behind each position: row * K + k.
    positions_NK: the position that each choice got, -1 where the choice was not valid; inverse of choice_idx_M.
    expert_offsets: [E + 1] int32; expert e owns the positions from expert_offsets[e] to expert_offsets[e + 1].

    Example: expert_ids_NK = [[1, 0], [1, -1]] with 3 experts gives gather_idx [0, 0, 1], choice_idx [1, 0, 2],
    positions [[1, 0], [2, -1]], expert_offsets [0, 1, 3, 3].
    """

    gather_idx_M: Tensor
    choice_idx_M: Tensor
    positions_NK: Tensor
    expert_offsets: Tensor

    def __post_init__(self) -> None:
        """Raises ValueError for tensors that kernels cannot read."""
        for field in dataclasses.fields(self):
            check_contiguous(field.name, getattr(self, field.name))


def expert_order(
    expert_ids_NK: Tensor,
    num_experts: int,
    num_choices: int | None = None,
    kernels: Kernels = "auto",
    check_ids: bool = True,
) -> ExpertOrder:
    """Sort choices by expert; an id of -1 is no choice. ExpertOrder has the fields, and an example.

    expert_ids_NK: [N, K] integers. num_choices: M, how many of them are not -1; None: all. To count them here would be
    a host sync, so the number must be right.
    check_ids: raise ValueError for ids outside -1 (or 0) to num_experts - 1. On a GPU, where looking would be a host
    sync, a device-side assertion fails instead. kernels: see backend.py.
    """
    if expert_ids_NK.ndim != 2 or expert_ids_NK.is_floating_point():
        raise ValueError(f"expert ids must be [N, K] integers: got {[*expert_ids_NK.shape]} in {expert_ids_NK.dtype}")
    if num_experts < 1:
        raise ValueError(f"there must be at least one expert: got {num_experts}")
    if check_ids:
        _check_ids(expert_ids_NK, -1 if num_choices is not None else 0, num_experts)
    num_choices = expert_ids_NK.numel() if num_choices is None else num_choices
    return _sort_by_key(expert_ids_NK, num_experts, num_choices, 1, False, kernels)


def rank_order(ids_TK: Tensor, experts_per_rank: int, num_ranks: int, kernels: Kernels = "auto") -> ExpertOrder:
    """Sort the rows by the ranks that they go to, in which each has a row once; a rank holds experts_per_rank ids.

    In the result, ranks stand for experts. How many rows there are, expert_offsets[R], only the device knows; the
    indices are long enough for all that there could be, T x min(K, R), and undefined after the last one that there is.

    Example: ids [[0, 1], [1, 3]] with 2 experts on each of 2 ranks: token 0 goes to rank 0, token 1 to both ranks, so
    gather_idx [0, 1, 1, .], positions [[0, -1], [1, 2]], expert_offsets [0, 2, 3].
    """
    num_kept = len(ids_TK) * min(ids_TK.shape[1], num_ranks)
    return _sort_by_key(ids_TK, num_ranks, num_kept, experts_per_rank, True, kernels)


def _sort_by_key(
    ids_NK: Tensor, num_keys: int, num_kept: int, ids_per_key: int, once: bool, kernels: Kernels
) -> ExpertOrder:
    if use_triton(kernels, ids_NK):
        from .gpu.routing import order_by_expert

        return ExpertOrder(*order_by_expert(ids_NK.contiguous(), num_keys, num_kept, ids_per_key, once))
    keys_NK = ids_NK // ids_per_key
    valid_NK = ids_NK >= 0
    if once:
        valid_NK &= ~(keys_NK[:, :, None] == keys_NK[:, None, :]).tril(-1).any(-1)
    # Invalid choices sort behind every expert.
    keys = torch.where(valid_NK, keys_NK, num_keys).flatten()
    choice_idx_M = keys.argsort(stable=True)[:num_kept]
    positions = torch.full_like(keys, -1, dtype=torch.int64)
    positions[choice_idx_M] = torch.arange(len(choice_idx_M), device=keys.device)
    positions_NK = positions.view(ids_NK.shape).masked_fill_(~valid_NK, -1)
    counts = torch.zeros(num_keys + 1, dtype=torch.int64, device=keys.device)
    counts.scatter_add_(0, keys.long(), torch.ones_like(keys, dtype=torch.int64))
    offsets = torch.zeros(num_keys + 1, dtype=torch.int32, device=keys.device)
    offsets[1:] = counts[:num_keys].cumsum(0).clamp(max=num_kept)  # products write as many rows as this says
    return ExpertOrder(choice_idx_M // max(ids_NK.shape[1], 1), choice_idx_M, positions_NK, offsets)


def _check_ids(ids: Tensor, lowest: int, num_experts: int) -> None:
    if not ids.numel():
        return
    if ids.is_cuda:
        fit = ((ids >= lowest) & (ids < num_experts)).all()
        torch._assert_async(fit, f"expert ids outside {lowest} to {num_experts - 1}")
        return
    low, high = ids.aminmax()
    if low < lowest or high >= num_experts:
        problem = f"expert ids must be from {lowest} to {num_experts - 1}: got {int(low)} to {int(high)}"
        if lowest == 0 and low == -1:
            problem += "; where -1 is no choice, pass num_choices, the number of the others"
        raise ValueError(problem)
