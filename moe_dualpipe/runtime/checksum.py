"""A 64-bit checksum of a tensor's bits, computed on the tensor's device: replicas compare it instead of the tensor.

The checksum is the sum of the 64-bit words modulo 2^64, each multiplied by a different odd number. Odd numbers have
inverses modulo 2^64, so a change of a single word always changes the sum. A change of several words is missed with a
probability of about 2^-64.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 2**12  # words in a row; each row is also multiplied by an odd number
ROWS = 2**10  # rows that are summed at a time, to bound the memory


def checksum(tensor: Tensor) -> Tensor:
    """The checksum of a tensor of any dtype: an int64 scalar on the same device. Does not block the host.

    Equal bits give equal sums on all devices; -0.0 differs from 0.0, and NaNs with different bits differ. The last word
    is padded with zeros if elements are smaller than 8 bytes.
    """
    flat = tensor.detach().contiguous().flatten()
    in_word = 8 // flat.element_size()
    if flat.numel() % in_word or flat.storage_offset() % in_word:
        flat = pad(flat, (0, -flat.numel() % in_word)).clone()
    words_N = flat.view(torch.int64)
    whole, rest = divmod(len(words_N), BLOCK)
    factors_B, factors_J = _odd(BLOCK, 0, tensor.device), _odd(whole + 1, 1, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    rows_WB = words_N[: whole * BLOCK].view(whole, BLOCK)
    for rows_JB, some_J in zip(rows_WB.split(ROWS), factors_J[:whole].split(ROWS), strict=True):
        total += ((rows_JB * factors_B).sum(1) * some_J).sum()
    if rest:
        total += (words_N[whole * BLOCK :] * factors_B[:rest]).sum() * factors_J[whole]
    return total


@lru_cache(maxsize=64)
def _odd(count: int, seed: int, device: torch.device) -> Tensor:
    """Pseudo-random odd 64-bit numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1).to(device)
