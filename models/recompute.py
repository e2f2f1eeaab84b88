"""Computing again instead of keeping: what a block does not hold between its forward and its backward.

    none        everything that autograd wants is kept
    norms       the normalised copies of the residual stream are made again from the stream itself
    attention   the whole attention segment (norms, attention, router) runs again just before its backward
    full        the MLP segments do, too; only what passes between segments is kept, rows that were received included

Results are the same, bit for bit, and no communication is repeated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Recompute = Literal["none", "norms", "attention", "full"]
RECOMPUTE: tuple[str, ...] = get_args(Recompute)

Again = Callable[[], Tensor]


@contextmanager
def forgetting(y: Tensor, again: Again | None) -> Iterator[None]:
    """Within this context, whoever saves `y` for a backward keeps `again` instead, which computes its values anew."""
    if again is None:
        yield
        return

    forgotten = _identity(y)  # not `y` itself: autograd keeps `pack`, and what it refers to

    def pack(t: Tensor) -> Any:
        return (again, t.shape) if _identity(t) == forgotten else t

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        make, shape = packed
        with torch.no_grad():
            return make().view(shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _identity(t: Tensor) -> tuple[Any, ...]:
    """Equal for a contiguous tensor and its reshapes."""
    return t.data_ptr(), t.numel(), t.dtype, t.is_contiguous()


def normalise(norm: nn.Module, x: Tensor, forget: bool) -> tuple[Tensor, Again | None]:
    """norm(x), and what makes it again; None if it is to be kept."""
    if not (forget and torch.is_grad_enabled()):
        return norm(x), None
    kept = x.detach()
    return checkpoint(norm, x, use_reentrant=False, preserve_rng_state=False), lambda: norm(kept)
