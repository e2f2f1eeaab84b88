"""Initial weights that depend on a seed and a name, and on nothing else.

The same layer must start from the same weights whichever rank builds it, and two replicas of a stage from equal ones.
So every layer draws from a generator of its own, seeded by its name.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int, name: str) -> Iterator[None]:
    """Within this context, torch's CPU generator is seeded by `seed` and `name`; afterwards it is as before.

    Where tensors are made on the meta device there are no numbers to draw, and nothing is seeded: a large model has
    thousands of experts.
    """
    if torch.get_default_device().type == "meta":
        yield
        return
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest[:8], "little"))
        yield
