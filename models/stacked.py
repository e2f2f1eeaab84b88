"""Which parameters are several matrices, one above the other, because one product with all of them is faster.

Some optimizers look at a matrix as a whole, and must know where one ends. A module that stacks matrices says so in an
attribute: `self.stacked = {"qkv.weight": (128, 64, 64)}`, a parameter's name in it -> the rows of each matrix. Where
experts are stacked, too, these are the rows in each expert.
"""

from collections.abc import Iterable

from torch import nn


def stacked_matrices(stages: Iterable[nn.Module]) -> dict[str, tuple[int, ...]]:
    """The rows of each matrix in every parameter, by its global name, that stacks some."""
    return {
        f"{prefix}.{name}": tuple(rows)
        for stage in stages
        for prefix, module in stage.named_modules()
        for name, rows in getattr(module, "stacked", {}).items()
    }
