"""Which token comes next: drawn from the model's distribution, or from what is left of it without its unlikely end.

Each unlikely token is hardly ever drawn, but there are many of them, and one is enough to lead a text astray. So top-k
keeps the k likeliest, and top-p (the nucleus, arXiv 1904.09751) the likeliest that together have a probability of p.

B sequences, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Raises ValueError for choices that mean nothing.

    temperature: logits are divided by it; 0 takes the likeliest token. top_k: tokens to choose among; 0 for all.
    top_p: of these the fewest, likeliest first, that have this share of their probability; 1 for all.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature cannot be negative: got {self.temperature}; 0 takes the likeliest token")
        if self.top_k < 0:
            raise ValueError(f"top_k cannot be negative: got {self.top_k}; 0 is for all tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0, and at most 1: got {self.top_p}; 1 is for all tokens")

    def draw(self, logits_BV: Tensor, random: torch.Generator) -> Tensor:
        """One token for each row, [B]. `random` is on the CPU, so that a seed means the same on every device."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        fp32_BV = logits_BV.float().cpu()
        # Below the likeliest token's 0, a temperature near 0 gives -inf; dividing logits by it would give infinities.
        scaled_BV = (fp32_BV - fp32_BV.amax(-1, keepdim=True)) / max(self.temperature, 1e-30)
        probabilities_BV = filtered(scaled_BV, self.top_k, self.top_p).softmax(-1)
        return torch.multinomial(probabilities_BV, 1, generator=random)[:, 0].to(logits_BV.device)


def filtered(logits_BV: Tensor, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """The logits of the tokens to choose among, and -inf for all others, [B, V]; of equal ones the first goes first.

    Example: with probabilities 0.5, 0.3, 0.2 a top_p of 0.6 keeps two tokens; after top_k=2, which leaves them 0.625
    and 0.375, it keeps one.
    """
    if not top_k and top_p == 1:
        return logits_BV
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True, stable=True)
    if top_k:
        sorted_BV[:, top_k:] = -torch.inf
    if top_p < 1:
        likelier_BV = F.pad(sorted_BV.softmax(-1).cumsum(-1)[:, :-1], (1, 0))  # how probable it is to draw one above
        sorted_BV = sorted_BV.masked_fill(likelier_BV >= top_p, -torch.inf)
    return torch.empty_like(logits_BV).scatter_(-1, order_BV, sorted_BV)
