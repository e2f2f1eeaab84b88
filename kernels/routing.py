"""Put the choices of a router into expert-major order: which row goes where, without a loop over experts.

The plain-torch operator. N rows, K choices a row, M valid choices in total, E experts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


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


def expert_order(expert_ids_NK: Tensor, num_experts: int, num_choices: int | None = None) -> ExpertOrder:
    """Sort choices by expert; an id of -1 is no choice.

    num_choices: how many ids are valid, where the caller knows it; otherwise all are. It spares a host sync.
    """
    ids = expert_ids_NK.flatten()
    num_choices = ids.numel() if num_choices is None else num_choices
    # Invalid choices sort behind every expert and are cut off.
    keys = torch.where(ids < 0, num_experts, ids)
    choice_idx_M = keys.argsort(stable=True)[:num_choices]
    positions = torch.full_like(ids, -1, dtype=torch.int64)
    positions[choice_idx_M] = torch.arange(num_choices, device=ids.device)
    counts_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=ids.device)
    counts_E.scatter_add_(0, keys.long(), torch.ones_like(keys, dtype=torch.int64))
    expert_offsets = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    expert_offsets[1:] = counts_E[:num_experts].cumsum(0)
    columns = max(expert_ids_NK.shape[1], 1)
    return ExpertOrder(choice_idx_M // columns, choice_idx_M, positions.view(expert_ids_NK.shape), expert_offsets)
