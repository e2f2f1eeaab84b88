"""The backend on torch.distributed: variable-sized all-to-all over NCCL or gloo.

Only rows that are needed travel, each once per rank, however many of its experts live there:

    prepare   [rows, choices] per rank, then the chosen expert ids of each row       T x K ids -> who sends what
    dispatch  the rows, and their routing weights                                    [T, D] -> [N, D]
    combine   one row back per row received; the source adds up over ranks           [N, D] -> [T, D]

Split sizes must be known on the host, so `prepare` waits for one small exchange of counts.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moe_dualpipe.kernels.permute import sum_rows_reference
from moe_dualpipe.kernels.routing import expert_order

from .local import to_choices
from .protocol import Combined, Ready, Received, Route


@dataclass(frozen=True, slots=True)
class _Plan:
    """The sender's side of a route.

    sent_S: the token behind each of the S rows sent, by destination rank. slots_TR: the row in which token t goes to
    rank r, or -1. rows_out, rows_in: how many rows go to, and come from, each rank.
    """

    sent_S: Tensor
    slots_TR: Tensor
    rows_out: list[int]
    rows_in: list[int]


class AllToAll:
    """Experts divided evenly over the ranks of `group`, in order.

    Raises ValueError when the experts cannot be divided evenly.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup):
        self.num_ranks, rank = group.size(), group.rank()
        if num_experts % self.num_ranks:
            raise ValueError(f"{num_experts} experts cannot be divided evenly over {self.num_ranks} ranks")
        self.num_experts, self.group = num_experts, group
        self.experts_per_rank = num_experts // self.num_ranks
        self.local_experts = range(rank * self.experts_per_rank, (rank + 1) * self.experts_per_rank)

    def prepare(self, expert_ids_TK: Tensor) -> Route:
        expert_ids_TK = expert_ids_TK.long()
        ranks_TK = expert_ids_TK // self.experts_per_rank
        choices_TR = torch.nn.functional.one_hot(ranks_TK, self.num_ranks).sum(1)
        sends_TR = choices_TR > 0
        counts_R2 = torch.stack([sends_TR.sum(0), choices_TR.sum(0)], dim=1)
        counts_in_R2 = torch.empty_like(counts_R2)
        dist.all_to_all_single(counts_in_R2, counts_R2, group=self.group)
        # One copy to the host for all four counts.
        counts_out, counts_in = torch.stack([counts_R2, counts_in_R2]).tolist()
        rows_out, rows_in = [rows for rows, _ in counts_out], [rows for rows, _ in counts_in]

        to_S, sent_S = sends_TR.T.nonzero_static(size=sum(rows_out)).unbind(1)
        slots_TR = torch.full_like(choices_TR, -1)
        slots_TR[sent_S, to_S] = torch.arange(len(sent_S), device=sent_S.device)
        foreign_SK = ranks_TK[sent_S] != to_S[:, None]
        plan = _Plan(sent_S, slots_TR, rows_out, rows_in)

        local_ids_SK = (expert_ids_TK[sent_S] % self.experts_per_rank).masked_fill(foreign_SK, -1)
        local_ids_NK = self._exchange(local_ids_SK, rows_out, rows_in)
        order = expert_order(local_ids_NK, self.experts_per_rank, sum(choices for _, choices in counts_in))
        return Route(order, sum(rows_in), plan)

    def dispatch(self, x_TD: Tensor, route: Route, weights_TK: Tensor | None = None) -> Ready[Received]:
        plan: _Plan = route.handle
        x_ND = self._exchange(x_TD[plan.sent_S], plan.rows_out, plan.rows_in)
        if weights_TK is None:
            return Ready(Received(x_ND, None))
        weights_NK = self._exchange(weights_TK[plan.sent_S], plan.rows_out, plan.rows_in)
        return Ready(Received(x_ND, weights_NK.flatten()[route.order.choice_idx_M]))

    def combine(self, y_ND: Tensor, route: Route, weight_grads_M: Tensor | None = None) -> Ready[Combined]:
        plan: _Plan = route.handle
        y_SD = self._exchange(y_ND.contiguous(), plan.rows_in, plan.rows_out)
        y_TD = sum_rows_reference(y_SD, plan.slots_TR)
        if weight_grads_M is None:
            return Ready(Combined(y_TD, None))
        grads_SK = self._exchange(to_choices(weight_grads_M, route), plan.rows_in, plan.rows_out)
        # A choice is local to exactly one of the ranks its token went to; the others returned zero for it.
        return Ready(Combined(y_TD, sum_rows_reference(grads_SK, plan.slots_TR)))

    def _exchange(self, rows: Tensor, rows_out: list[int], rows_in: list[int]) -> Tensor:
        received = rows.new_empty(sum(rows_in), *rows.shape[1:])
        dist.all_to_all_single(received, rows, rows_in, rows_out, group=self.group)
        return received
