"""Temporary evaluation mode: dropout is off, and running statistics do not change."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside this context, the modules are in evaluation mode. Afterwards, each submodule gets its own mode back."""
    roots = [*modules]
    before = [(part, part.training) for root in roots for part in root.modules()]
    for root in roots:
        root.eval()
    try:
        yield
    finally:
        for part, training in before:  # parents come first: `train` also changes submodules
            if part.training != training:
                part.train(training)
