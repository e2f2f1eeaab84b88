"""Small modules written as segments."""

from typing import Any

import torch
from torch import nn

from moe_dualpipe.expert_parallel import Completed
from moe_dualpipe.overlap import Comm, Compute, Segmented


def module_of(body, **parts) -> Any:
    """A module with the attributes `parts` whose `segments(self, ...)` is `body`."""
    module = type("Mine", (Segmented,), {"segments": body})()
    for name, part in parts.items():
        setattr(module, name, part)
    return module


def doubled(x):
    return Completed((2 * x,))


class Twice(Segmented):
    """x -> 2 * a(x) + b(x). A transfer doubles a(x), and its backward doubles the gradient."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def segments(self, x):
        y = yield Compute("a", self.a, x)
        arriving = yield Comm("double", doubled, doubled, y)
        z = yield Compute("b", self.b, x)
        return (yield Compute("add", torch.add, arriving, z))
