"""The transfers of Loopback on a GPU: the kernels of Symmetric, in the memory of one process.

All ranks send the same rows. So what this rank writes for rank r is what it receives from rank r: the addresses of all
ranks lead to their regions of this rank's memory. The kernel that writes rows keeps the pace of the link, on as many
multiprocessors. Then the kernels that copy or sum the received rows run on the same stream, and find all of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.backend import Kernels
from ..exchange import row_bytes
from ..symmetric.one_sided import DirectWrites, OneSided, OneSidedPlan
from .link import Link

if TYPE_CHECKING:
    from ...kernels.gpu.signals import Operation, Windows
    from ..symmetric.one_sided import Push


class PacedWrites(DirectWrites):
    """Messages are written at the pace of `link`, on as many multiprocessors. sent: the bytes sent to other ranks."""

    def __init__(self, sent: Tensor):
        self.sent, self.link = sent, Link()

    def send(self, windows: "Windows", operation: "Operation", fields: Sequence[Tensor], push: "Push") -> None:
        from ...kernels.gpu.push import Pace

        num_bytes, link = row_bytes(fields), self.link
        pace = Pace(num_bytes, 1e3 * link.latency_us, num_bytes / link.gb_per_s, self.sent)
        push(replace(windows, num_sms=link.sms), pace)


class LoopbackWindows(OneSided):
    """Rank 0 of `num_ranks` virtual ranks. The options are those of OneSided.

    sent: one int64 on the device, to which the bytes sent to other ranks are added.
    previous: windows that were too small. Their memory is kept, because other streams may still use it.
    """

    def __init__(
        self, num_experts: int, num_ranks: int, kernels: Kernels, sent: Tensor, *, max_tokens: int, row_bytes: int,
        top_k: int, slots: int = 2, previous: "LoopbackWindows | None" = None,
    ):  # fmt: skip
        self.paced, self.sent, self.previous = PacedWrites(sent), sent, previous
        super().__init__(
            num_experts, num_ranks, 0, kernels, max_tokens=max_tokens, row_bytes=row_bytes, top_k=top_k, slots=slots,
            timeout=1.0, transport=self.paced,
        )  # fmt: skip  # all rows are there before a kernel looks for them
        self.connect(mirrored_memory(self.memory_words, num_ranks, sent.device))

    def fits(self, tokens: int, row_bytes: int, top_k: int) -> bool:
        return tokens <= self.max_tokens and row_bytes <= self.max_row and top_k <= self.top_k

    def _received_sizes(self, plan: OneSidedPlan) -> tuple[int, int]:
        """This rank receives as many rows as it sends, and each choice once."""
        tokens, most_rows = plan.slots_TC.shape
        return tokens * most_rows, tokens * plan.top_k


def mirrored_memory(num_words: int, num_ranks: int, device: torch.device) -> list[Tensor]:
    """Memory of rank 0, zeros in int32, and of each other rank: a view of it that starts at that rank's region."""
    own = torch.zeros(num_words, dtype=torch.int32, device=device)
    return [own[r * num_words // num_ranks :] for r in range(num_ranks)]
