"""A 64-bit checksum of a tensor's bits, computed on the tensor's device: replicas compare it instead of the tensor.

The checksum is the sum of the 32-bit words modulo 2^64, each multiplied by a different odd 64-bit number. Odd numbers
have inverses modulo 2^64, so a change of a single word always changes the sum. A change of several words is missed with
a probability of about 2^-64 if the changes differ in their lowest bits, and below 2^-24 in the worst case, such as the
signs of many words. Words of 64 bits would need fewer products, but the highest bits of two words would always cancel.
"""

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 2**12  # words in a row; each row is also multiplied by an odd number
ROWS, DEVICE_ROWS = 2**4, 2**11  # rows at a time: products that fit into the cache of a CPU; few kernels on a GPU


def checksum(tensor: Tensor) -> Tensor:
    """The checksum of a tensor of any dtype: an int64 scalar on the same device. Does not block the host.

    Equal bits give equal sums on all devices; -0.0 differs from 0.0, and NaNs with different bits differ. The last word
    is padded with zeros if elements are smaller than 4 bytes.
    """
    bytes_ = tensor.detach().contiguous().flatten().view(torch.uint8)
    if bytes_.numel() % 4 or bytes_.storage_offset() % 4:
        bytes_ = pad(bytes_, (0, -bytes_.numel() % 4)).clone()
    words_N = bytes_.view(torch.int32)
    whole, rest = divmod(len(words_N), BLOCK)
    factors_B, factors_J = _odd(BLOCK, 0, tensor.device), _odd(whole + 1, 1, tensor.device)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    rows_WB = words_N[: whole * BLOCK].view(whole, BLOCK)
    at_a_time = ROWS if tensor.device.type == "cpu" else DEVICE_ROWS
    for rows_JB, some_J in zip(rows_WB.split(at_a_time), factors_J[:whole].split(at_a_time), strict=True):
        total += ((rows_JB * factors_B).sum(1) * some_J).sum()
    if rest:
        total += (words_N[whole * BLOCK :] * factors_B[:rest]).sum() * factors_J[whole]
    return total


@lru_cache(maxsize=64)
def _odd(count: int, seed: int, device: torch.device) -> Tensor:
    """Pseudo-random odd 64-bit numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(-(2**62), 2**62, (count,), generator=generator) * 2 + 1).to(device)
