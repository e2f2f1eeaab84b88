"""Sampling: draw the next token from the model's distribution, optionally without its unlikely tokens.

Each unlikely token is rarely drawn, but there are many, and a single one can spoil a text. Top-k keeps the k most
likely tokens. Top-p (nucleus sampling, arXiv 1904.09751) keeps the smallest set of most likely tokens with a total
probability of at least p.

B sequences, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from ..messages import check_range


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: top-k first, then top-p of the rest. Raises ValueError for invalid values."""

    temperature: float = 0.8
    """Logits are divided by it. 0: greedy decoding."""
    top_k: int | None = None
    """Sample from the k most likely tokens. None: no limit."""
    top_p: float = 1.0
    """Sample from the fewest most likely tokens with this total probability. 1: no limit."""

    def __post_init__(self) -> None:
        check_range("temperature", self.temperature, 0, 1e6, "; 0 is greedy decoding")
        if self.top_k is not None:
            check_range("top_k", self.top_k, 1, hint="; None is no limit")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0, and at most 1: got {self.top_p}; 1 is no limit")

    def draw(
        self, logits_BV: Tensor, random: Sequence[torch.Generator], wanted: Sequence[bool] | None = None
    ) -> Tensor:  # fmt: skip
        """Draw one token for each row, [B], with its own generator.

        Generators are on the CPU, so a seed draws the same tokens on any device. wanted: rows that are drawn; the
        others get token 0 unless decoding is greedy.
        Raises ValueError if the logits are NaN or infinite.
        """
        if not logits_BV.amax(-1).isfinite().all():
            raise ValueError("the model gives logits that are not finite: its weights may be NaN or too large")
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        fp32_BV = logits_BV.float().cpu()
        # The most likely token becomes 0, so a temperature near 0 gives -inf for the others, and never +inf.
        scaled_BV = (fp32_BV - fp32_BV.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        probabilities_BV = filtered(scaled_BV, self.top_k, self.top_p).softmax(-1)
        drawn_B = torch.zeros(len(logits_BV), dtype=torch.int64)
        for row, one in enumerate(random):
            if wanted is None or wanted[row]:
                drawn_B[row] = torch.multinomial(probabilities_BV[row], 1, generator=one)[0]
        return drawn_B.to(logits_BV.device)


def generators(seed: int, number: int, first: int = 0) -> list[torch.Generator]:
    """The generators of the texts from `first` on. That of a text does not depend on how many others there are."""
    seeds = torch.randint(2**62, (first + number,), generator=torch.Generator().manual_seed(seed))
    return [torch.Generator().manual_seed(one) for one in seeds[first:].tolist()]


def filtered(logits_BV: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """The logits, with -inf for tokens that top-k or top-p removes, [B, V]. Of equally likely tokens, the first stay.

    Example: with probabilities 0.5, 0.3, 0.2, top_p=0.6 keeps two tokens. With top_k=2 it keeps one: the probabilities
    that top-p sees are then 0.625 and 0.375.
    """
    if top_k is None and top_p == 1:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        sorted_BV[:, top_k:] = -torch.inf
    if top_p < 1:
        # The total of all more likely tokens. -1: the most likely one always stays, even if top_p rounds to 0.
        total_before_BV = F.pad(sorted_BV.softmax(-1).cumsum(-1)[:, :-1], (1, 0), value=-1.0)
        sorted_BV = sorted_BV.masked_fill(total_before_BV >= top_p, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)
