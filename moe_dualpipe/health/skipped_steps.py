"""A step with a non-finite loss or gradient changes nothing; too many of them in a row end the run.

Loss and norm are sums over all ranks, so a NaN on one rank is a NaN on all, and all ranks skip the same steps without
communication. A skipped step changes no weight, no moment and no optimizer step count; data and learning rate advance.
"""

import math
import sys

import torch


class SkippedSteps:
    """Counts skipped steps. `total` is part of a checkpoint: the optimizer has done steps - total updates."""

    def __init__(self, max_in_a_row: int, announce: bool = True):
        self.max_in_a_row, self.announce = max_in_a_row, announce
        self.total = torch.zeros((), dtype=torch.int64)
        self.in_a_row = 0

    def finite(self, step: int, loss: float, norm: float) -> bool:
        """Whether to do the update of `step`. Exits with code 1 after too many skipped steps in a row."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        self.total += 1
        self._print(f"step {step} is skipped: its loss is {loss}, its gradient norm {norm} ({int(self.total)} so far)")
        if self.in_a_row >= self.max_in_a_row:
            self._print(
                f"error: {self.in_a_row} consecutive steps had a non-finite loss or gradient: the run stops without a "
                "checkpoint; resume from an earlier one with a lower --optim.lr, or check the data"
            )
            raise SystemExit(1)
        return False

    def _print(self, text: str) -> None:
        if self.announce:
            sys.stderr.write(f"train.py: {text}\n")
