"""Where experts are, if they are not in the order of their ids: some have moved to other ranks, or have copies.

A slot is room for one expert, and the ranks have consecutive slots, the same number each. A backend knows only slots.
So the ids that a router has chosen are replaced by slots before `prepare`. The tokens of an expert with several copies
are divided among them by their index. A rank that holds one of them uses its own. If all ranks have about the same
number of tokens for the expert, the copies still get equal shares: the other ranks divide theirs among all copies.

T tokens, K experts per token, E experts, C copies of the expert with most of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Slots:
    """The slots that this rank uses for each expert. The last row is for the id -1, no expert.

    slots_EC: [E + 1, C]; -1 for unused entries. number_E: how many are used, [E + 1]. offset: added to the index of
    tokens, so that ranks with few tokens do not all use the first copy.

    Example: experts 0 and 1, and a copy of 0, in slots 0, 1, 2: slots [[0, 2], [1, -1], [-1, -1]], number [2, 1, 1].
    """

    slots_EC: Tensor
    number_E: Tensor
    offset: int = 0

    def of(self, ids_TK: Tensor) -> Tensor:
        """The slot of each choice, [T, K]; -1 for no expert."""
        if self.slots_EC.shape[1] == 1:
            return self.slots_EC[:, 0][ids_TK]
        token_T1 = torch.arange(len(ids_TK), device=ids_TK.device)[:, None] + self.offset
        return self.slots_EC[ids_TK, token_T1 % self.number_E[ids_TK]]


def find_slots(experts: Sequence[int], own: range, device: torch.device | None = None) -> Slots | None:
    """The slots for a rank with the slots `own`; None if each expert is in the slot of its id.

    experts: the expert in each slot of all ranks.
    """
    num_experts, per_rank = max(experts) + 1, len(own)
    if list(experts) == [*range(num_experts)]:
        return None
    used: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(experts):
        used[expert].append(slot)
    for slots in used:
        if len({slot // per_rank for slot in slots}) == len(slots):  # otherwise, copies would get unequal shares
            slots[:] = [slot for slot in slots if slot in own] or slots
    most = max(map(len, used))
    table = [[*slots, *[-1] * (most - len(slots))] for slots in (*used, [])]
    number = [max(1, len(slots)) for slots in (*used, [])]
    return Slots(torch.tensor(table, device=device), torch.tensor(number, device=device), own.start // per_rank)
