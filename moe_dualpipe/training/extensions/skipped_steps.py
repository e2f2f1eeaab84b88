"""A step with a non-finite loss or gradient changes nothing; too many of them in a row end the run.

Loss and norm are sums over all ranks, so a NaN on one rank is a NaN on all, and all ranks skip the same steps without
communication. A skipped step changes no weight, no moment and no optimizer step count; data and learning rate advance.
"""

import math

import torch
from torch import Tensor

from ...health.report import print_now, program_name
from . import Extension, Update


class SkippedSteps(Extension):
    """Counts skipped steps. `total` is part of a checkpoint: the optimizer has done steps - total updates.

    in_a_row: the number of steps that were skipped since the last update or the start of this process.
    """

    def __init__(self, max_in_a_row: int, announce: bool = True):
        self.max_in_a_row, self.announce = max_in_a_row, announce
        self.total = torch.zeros((), dtype=torch.int64)
        self.in_a_row = 0

    def before_update(self, update: Update) -> None:
        update.finite = math.isfinite(update.loss) and math.isfinite(update.norm)
        self.in_a_row = 0 if update.finite else self.in_a_row + 1
        if not update.finite:
            self.total += 1
            if self.announce:
                why = f"its loss is {update.loss}, its gradient norm {update.norm} ({int(self.total)} so far)"
                print_now(f"{program_name()}: step {update.step + 1} is skipped: {why}\n")

    def after_update(self, update: Update) -> None:
        update.record["skipped"] = int(self.total)

    def state(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return state | {"skipped": self.total}

    @property
    def too_many(self) -> bool:
        """Whether the run must end."""
        return self.in_a_row >= self.max_in_a_row
