"""Sums of fp32 numbers without rounding, so that neither their order nor the ranks that hold them change the result.

The sum of the squared gradients of all ranks is in every clipped gradient. Rounded sums of each rank would change its
last bits when a tensor moves to another rank. So numbers are added as integers, as in Kulisch's accumulator: fp32
numbers are multiples of 2^-172 with 24 bits, and words of 32 bits, in int64, hold every one of them.

Example: 1 is 2^172 units: bit 172 % 32 = 12 of word 172 // 32 = 5.
"""

from functools import lru_cache

import torch
from torch import Tensor

_WORDS, _BITS, _UNIT = 10, 32, -172


def to_words(values_N: Tensor) -> Tensor:
    """The exact sum of fp32 numbers of at least 0, as words that can be added: int64 [12]. At most 2^31 numbers.

    The last two words count infinities and NaNs.
    """
    finite_N = values_N.isfinite()
    mantissa_N, exponent_N = torch.frexp(torch.where(finite_N, values_N, 0.0))
    bit_N = exponent_N.long() - 24 - _UNIT
    shifted_N = (mantissa_N * 2**24).long() << bit_N % _BITS
    word_N = bit_N // _BITS
    words = torch.zeros(_WORDS + 2, dtype=torch.int64, device=values_N.device)
    words.scatter_add_(0, word_N, shifted_N % 2**_BITS)
    words.scatter_add_(0, word_N + 1, shifted_N >> _BITS)
    words[-2], words[-1] = values_N.isinf().sum(), values_N.isnan().sum()
    return words


def from_words(words: Tensor) -> Tensor:
    """The sum in fp64, rounded; infinity or NaN if a number was."""
    total = (words[:_WORDS].double() * _units(words.device)).sum()
    total = torch.where(words[-2] > 0, torch.inf, total)
    return torch.where(words[-1] > 0, torch.nan, total)


@lru_cache(maxsize=8)
def _units(device: torch.device) -> Tensor:
    return torch.tensor([2.0 ** (_BITS * word + _UNIT) for word in range(_WORDS)], dtype=torch.float64, device=device)
