"""Which tokens a rank sends to which ranks: once to each rank that holds any of a token's experts.

The sent rows are sorted by destination rank, then by token.

T tokens on this rank, K experts per token, R ranks. M = T min(K, R) is an upper bound of the number of sent rows.
"""

import torch
from torch import Tensor

from ..kernels.backend import Kernels
from ..kernels.routing import ExpertOrder, count_choices, rank_order


def count_sends(
    expert_ids_TK: Tensor, num_experts: int, num_ranks: int, kernels: Kernels
) -> tuple[ExpertOrder, Tensor]:
    """Return the tokens sorted by rank, and the numbers [rows, choices] to send to each rank, [R, 2].

    Raises ValueError for expert ids out of range, except on a GPU.
    """
    count_choices(expert_ids_TK, num_experts)  # checks the ids
    experts_per_rank = num_experts // num_ranks
    order = rank_order(expert_ids_TK, experts_per_rank, num_ranks, kernels)
    # Choices of no expert count for one more rank.
    ranks = torch.where(expert_ids_TK >= 0, expert_ids_TK // experts_per_rank, num_ranks).flatten().long()
    choices_R = torch.zeros(num_ranks + 1, dtype=torch.int64, device=ranks.device)
    choices_R = choices_R.scatter_add_(0, ranks, torch.ones_like(ranks))[:-1]
    return order, torch.stack([order.expert_offsets.diff().long(), choices_R], dim=1)


def find_sends(
    expert_ids_TK: Tensor, order: ExpertOrder, experts_per_rank: int, num_ranks: int
) -> tuple[Tensor, Tensor]:
    """Return the expert ids of each sent row, and the sent rows of each token.

    ids_MK: local to the destination; -1 for experts on other ranks and for no expert. Only the entries of sent rows are
    meaningful. slots_TC: -1 for unused entries; C = min(K, R).
    """
    slots_TC = order.positions_NK.sort(dim=1).values[:, -min(num_ranks, expert_ids_TK.shape[1]) :]
    ids_MK, chosen_M = expert_ids_TK[order.gather_idx_M], expert_ids_TK.flatten()[order.choice_idx_M]
    same_rank_MK = ids_MK // experts_per_rank == (chosen_M // experts_per_rank)[:, None]
    return torch.where(same_rank_MK, ids_MK % experts_per_rank, -1).int(), slots_TC
