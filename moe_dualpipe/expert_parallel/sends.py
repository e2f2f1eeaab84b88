"""Which tokens a rank sends to which ranks: once to each rank that holds any of a token's experts.

The sent rows are sorted by destination rank, then by token. `count_sends` returns their numbers, and an object that
finds the rest: the numbers can travel in the meantime.

T tokens on this rank, K experts per token, R ranks, S sent rows. M = T min(K, R) is an upper bound of S.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.backend import Kernels, use_triton
from ..kernels.order import ExpertOrder
from ..kernels.routing import count_choices, rank_order
from ..overlap import streams


class Sends(NamedTuple):
    """The sent rows. If they were found by marking tokens, M = S. Otherwise, the entries after the first S are unused.

    tokens_M: the token of each row. ids_MK: its expert ids, local to the destination; -1 for experts on other ranks and
    for no expert. slots_TC: the rows of each token, in the order of ranks; -1 for unused entries. C = min(K, R).
    """

    tokens_M: Tensor
    ids_MK: Tensor
    slots_TC: Tensor


class Finder(Protocol):
    def find(self) -> Sends: ...


def count_sends(expert_ids_TK: Tensor, num_experts: int, num_ranks: int, kernels: Kernels) -> tuple[Tensor, Finder]:
    """Return the numbers [rows, choices] to send to each rank, [R, 2] in int64, and an object that finds the rows.

    Raises ValueError for expert ids out of range, except on a GPU.
    """
    count_choices(expert_ids_TK, num_experts)  # checks the ids
    experts_per_rank = num_experts // num_ranks
    device = expert_ids_TK.device
    if device.type == "cpu" and streams.streams_of(device) is None and not use_triton(kernels, expert_ids_TK):
        return _mark_tokens(expert_ids_TK, experts_per_rank, num_ranks)
    return _sort_tokens(expert_ids_TK, experts_per_rank, num_ranks, kernels)


# ---- by sorting, without a host sync ----


@dataclass(frozen=True, slots=True)
class _Sorted:
    ids_TK: Tensor
    experts_per_rank: int
    num_ranks: int
    order: ExpertOrder

    def find(self) -> Sends:
        order, ids_TK, experts_per_rank = self.order, self.ids_TK, self.experts_per_rank
        slots_TC = order.positions_NK.sort(dim=1).values[:, -min(self.num_ranks, ids_TK.shape[1]) :]
        ids_MK, chosen_M = ids_TK[order.gather_idx_M], ids_TK.flatten()[order.choice_idx_M]
        same_rank_MK = ids_MK // experts_per_rank == (chosen_M // experts_per_rank)[:, None]
        ids_MK = torch.where(same_rank_MK, ids_MK % experts_per_rank, -1).int()
        return Sends(order.gather_idx_M, ids_MK, slots_TC)


def _sort_tokens(
    ids_TK: Tensor, experts_per_rank: int, num_ranks: int, kernels: Kernels
) -> tuple[Tensor, _Sorted]:  # fmt: skip
    order = rank_order(ids_TK, experts_per_rank, num_ranks, kernels)
    # Choices of no expert count for one more rank.
    ranks = torch.where(ids_TK >= 0, ids_TK // experts_per_rank, num_ranks).flatten().long()
    choices_R = torch.zeros(num_ranks + 1, dtype=torch.int64, device=ranks.device)
    choices_R = choices_R.scatter_add_(0, ranks, torch.ones_like(ranks))[:-1]
    counts_R2 = torch.stack([order.expert_offsets.diff().long(), choices_R], dim=1)
    return counts_R2, _Sorted(ids_TK, experts_per_rank, num_ranks, order)


# ---- by marking the tokens of each rank, in numpy: on a CPU in a third to a fifth of the time of sorting ----


@dataclass(frozen=True, slots=True)
class _Marked:
    ids_TK: np.ndarray
    experts_per_rank: int
    sent_RT: np.ndarray

    def find(self) -> Sends:
        num_ranks, (tokens, top_k) = len(self.sent_RT), self.ids_TK.shape
        rank_S, token_S = self.sent_RT.nonzero()
        ids_SK = self.ids_TK.take(token_S, 0) - (rank_S * self.experts_per_rank)[:, None]
        ids_SK[(ids_SK < 0) | (ids_SK >= self.experts_per_rank)] = -1
        slots_RT = np.full((num_ranks, tokens), -1, dtype=np.int32)
        slots_RT[self.sent_RT] = np.arange(len(token_S), dtype=np.int32)
        slots_TC = slots_RT.T if num_ranks <= top_k else np.sort(slots_RT.T, axis=1)[:, num_ranks - top_k :]
        return Sends(*(torch.from_numpy(np.ascontiguousarray(a, np.int32)) for a in (token_S, ids_SK, slots_TC)))


def _mark_tokens(expert_ids_TK: Tensor, experts_per_rank: int, num_ranks: int) -> tuple[Tensor, _Marked]:
    ids_TK = expert_ids_TK.numpy()
    sent_RT, ranks_TK = sent_tokens(ids_TK, experts_per_rank, num_ranks)
    choices_R = np.bincount(ranks_TK.ravel() + 1, minlength=num_ranks + 1)[1:]
    counts_R2 = np.stack([sent_RT.sum(1), choices_R], axis=1)
    return torch.from_numpy(counts_R2), _Marked(ids_TK, experts_per_rank, sent_RT)


def sent_tokens(ids_TK: np.ndarray, experts_per_rank: int, num_ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Whether each token is sent to each rank, [R, T], and the rank of each choice; -1 for no expert."""
    ranks_TK = ids_TK // experts_per_rank
    sent_RT = np.zeros((num_ranks + 1, len(ids_TK)), dtype=bool)
    sent_RT[ranks_TK, np.arange(len(ids_TK))[:, None]] = True  # -1 marks the last row
    return sent_RT[:-1], ranks_TK
