"""Recomputation: what a block computes again in its backward, instead of saving it.

    none        save everything that autograd needs
    norms       recompute the normalized copies of the residual stream
    attention   also run the whole attention segment (norms, attention, router) again just before its backward
    full        also run the MLP segments again; save only what passes between segments, received rows included

Results are bit-equal. No communication is repeated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RecomputeTensor = Callable[[], Tensor]
"""Computes a tensor again."""


@contextmanager
def recompute_saved(y: Tensor, recompute: RecomputeTensor | None) -> Iterator[None]:
    """In this context, autograd saves `recompute` instead of `y`, and calls it in backward. None: it saves `y`."""
    if recompute is None:
        yield
        return
    recomputed = _identity(y)  # autograd keeps `pack` and all it refers to: it must not refer to `y`

    def pack(t: Tensor) -> Any:
        return (recompute, t.shape) if _identity(t) == recomputed else t

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


def normalize(norm: nn.Module, x: Tensor, recompute: bool) -> tuple[Tensor, RecomputeTensor | None]:
    """Return norm(x), and a function that computes it again; None if norm(x) is saved instead."""
    if not (recompute and torch.is_grad_enabled()):
        return norm(x), None
    saved = x.detach()
    return checkpoint(norm, x, use_reentrant=False, preserve_rng_state=False), lambda: norm(saved)
