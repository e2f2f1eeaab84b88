"""Steps whose loss or gradient is not finite change nothing, and too many of them in a row end the run.

Loss and norm are sums over all ranks, so a NaN anywhere is a NaN everywhere, and all ranks skip the same steps without
asking each other. Such a step leaves weights, moments and the optimizer's count alone; data and learning rate go on.
"""

import math
import sys

import torch


class Skips:
    """Counts skipped steps. `total` belongs to a checkpoint: the optimizer's count is that much behind the steps."""

    def __init__(self, most_in_a_row: int, announce: bool = True):
        self.most_in_a_row, self.announce = most_in_a_row, announce
        self.total = torch.zeros((), dtype=torch.int64)
        self.in_a_row = 0

    def finite(self, step: int, loss: float, norm: float) -> bool:
        """Whether to go ahead with the update of `step`. Exits with code 1 if it is one too many in a row."""
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        self.total += 1
        self._say(f"step {step} is skipped: its loss is {loss}, its gradient norm {norm} ({int(self.total)} so far)")
        if self.in_a_row >= self.most_in_a_row:
            self._say(
                f"error: {self.in_a_row} steps in a row had no finite loss and gradient: the run stops, its "
                "checkpoints stay as they are; resume from one with a lower --optim.lr, or look at the data"
            )
            raise SystemExit(1)
        return False

    def _say(self, text: str) -> None:
        if self.announce:
            sys.stderr.write(f"train.py: {text}\n")
