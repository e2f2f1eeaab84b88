"""Ranks in one process whose kernels write into each other's windows."""

import torch

from moe_dualpipe.kernels.gpu import signals
from moe_dualpipe.kernels.gpu.signals import Operation, Windows, new_state, region_words
from tests.support.kernels import DEVICE

UNTOUCHED = -7  # a NaN as fp32
SLOTS = 2


class VirtualRanks:
    """Virtual ranks with windows of UNTOUCHED. words: length of a row without weights and ids."""

    def __init__(self, ranks, tokens, words, num_sms, timeout=600.0):
        size = SLOTS, tokens, words + 8
        self.memory = torch.full((ranks, ranks * region_words(*size)), UNTOUCHED, dtype=torch.int32, device=DEVICE)
        self.memory.view(ranks, ranks, -1)[:, :, : signals.first_window(SLOTS)] = 0
        addresses = torch.tensor([own.data_ptr() for own in self.memory], device=DEVICE)
        self.each = [
            Windows(
                addresses, new_state(SLOTS, self.memory.device), rank, *size, words, words + 4, num_sms, timeout)
            for rank in range(ranks)
        ]  # fmt: skip

    def windows(self, rank, slot):
        """[R, T, row] in words."""
        return self.each[rank].views(self.memory[rank])[1][slot]


def operation(number, layout=1):
    return Operation(number % SLOTS, number, layout)
