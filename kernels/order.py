"""What sorting the choices of tokens by expert returns, for routing in plain torch and in Triton.

E experts, N rows, K choices per row, M valid choices in total.
"""

import dataclasses
from dataclasses import dataclass, field

from torch import Tensor

from .backend import aligned, check_contiguous


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The valid choices of N rows, stably sorted by expert, as indices in int32.

    gather_idx_M: the row of each position. If M is larger than the number of valid choices, invalid ones follow.
    choice_idx_M: the choice of each position, as row * K + k.
    positions_NK: the position of each choice, -1 for invalid choices; the inverse of choice_idx_M.
    expert_offsets: [E + 1]; expert e has the positions from expert_offsets[e] to expert_offsets[e + 1].
    tile_tables: tables of tiles by height, which the Triton kernels of products read (gpu/tiles.py). May be empty.

    Example: expert_ids_NK = [[1, 0], [1, -1]] with 3 experts gives gather_idx [0, 0, 1], choice_idx [1, 0, 2],
    positions [[1, 0], [2, -1]], expert_offsets [0, 1, 3, 3].
    """

    gather_idx_M: Tensor
    choice_idx_M: Tensor
    positions_NK: Tensor
    expert_offsets: Tensor
    tile_tables: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Copy tensors that are not aligned. Raises ValueError for tensors that are not contiguous."""
        for name in ("gather_idx_M", "choice_idx_M", "positions_NK", "expert_offsets"):
            object.__setattr__(self, name, aligned(name, check_contiguous(name, getattr(self, name))))

    def trimmed(self) -> "ExpertOrder":
        """This order with M equal to the last offset. On a GPU, this waits for the device."""
        length = int(self.expert_offsets[-1])
        gather_idx_M, choice_idx_M = self.gather_idx_M[:length], self.choice_idx_M[:length]
        return dataclasses.replace(self, gather_idx_M=gather_idx_M, choice_idx_M=choice_idx_M)
