"""A step with a non-finite loss or gradient changes nothing; too many of them in a row end the run.

Loss and norm are sums over all ranks, so a NaN on one rank is a NaN on all, and all ranks skip the same steps without
communication. A skipped step changes no weight, no moment and no optimizer step count; data and learning rate advance.
"""

import math
import sys

import torch

from .program import program_name


class SkippedSteps:
    """Counts skipped steps. `total` is part of a checkpoint: the optimizer has done steps - total updates.

    in_a_row: the number of steps that were skipped since the last update or the start of this process.
    """

    def __init__(self, max_in_a_row: int, announce: bool = True):
        self.max_in_a_row, self.announce = max_in_a_row, announce
        self.total = torch.zeros((), dtype=torch.int64)
        self.in_a_row = 0

    def finite(self, step: int, loss: float, norm: float) -> bool:
        """Whether to do the update of `step`."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        self.total += 1
        if self.announce:
            skipped = f"step {step} is skipped: its loss is {loss}, its gradient norm {norm} ({int(self.total)} so far)"
            sys.stderr.write(f"{program_name()}: {skipped}\n")
        return False

    @property
    def too_many(self) -> bool:
        """Whether the run must end."""
        return self.in_a_row >= self.max_in_a_row
