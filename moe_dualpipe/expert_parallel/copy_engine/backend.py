"""The backend whose messages are sent by copy engines (copies.py), with a process group."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ...kernels.backend import Kernels
from ..options import MAX_COPIED
from ..rank_facts import RankFacts
from ..symmetric import Symmetric
from .copies import Copies, Flags


class CopyEngine(Symmetric):
    """Experts are divided evenly over the ranks of `group`, in order. Their GPUs can write into each other's memory.

    The other options, the errors and the rules for ranks are those of Symmetric. flags: what tells a rank that a
    message is complete: a copy, or a kernel of one program.

    Each transfer sends `max_tokens` rows to each rank, whatever the routing is: with 8 choices of 256 experts, 1.5
    times the bytes that 8 ranks need, and 8.5 times those that 64 ranks need. So it is for at most 16 ranks with few
    tokens, as in decoding. Training works too, but sends more than it needs.
    """

    def __init__(
        self, num_experts: int, group: dist.ProcessGroup, kernels: Kernels = "auto", *, flags: Flags = "copies",
        **options: Any,
    ):  # fmt: skip
        if group.size() > MAX_COPIED:
            raise ValueError(f"CopyEngine is for at most {MAX_COPIED} ranks: got {group.size()}; use Symmetric")
        super().__init__(num_experts, group, kernels, transport=Copies(flags), **options)

    @classmethod
    def fault(cls, facts: Sequence[RankFacts]) -> str:
        if len(facts) <= MAX_COPIED:
            return super().fault(facts)
        padded = "its messages are padded, too much"
        return f"{padded} for more than {MAX_COPIED} ranks that share experts: got {len(facts)}"
