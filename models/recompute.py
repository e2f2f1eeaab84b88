"""Recomputation: what a block computes again in its backward, instead of saving it.

    none        save everything that autograd needs
    norms       recompute the normalized copies of the residual stream
    attention   also run the whole attention segment (norms, attention, router) again just before its backward
    full        also run the MLP segments again; save only what passes between segments, received rows included

Results are bit-equal. No communication is repeated.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_dualpipe.kernels.fuse import fuse

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


def normalize(
    norm: nn.Module, parts: tuple[Tensor, ...], recompute: bool, compiled: bool
) -> tuple[Tensor, Tensor, RecomputeTensor | None]:
    """Return x, the sum of `parts`; norm(x); and a function that computes norm(x) again, or None if it is saved."""
    if not (recompute and torch.is_grad_enabled()):
        return *fuse(add_and_normalize, compiled)(norm, *parts), None
    if compiled:  # what is compiled saves x for backward, not norm(x)
        x, y = fuse(add_and_normalize, compiled)(norm, *parts)
    else:
        x = add_up(*parts)
        y = checkpoint(norm, x, use_reentrant=False, preserve_rng_state=False)
    return x, y, partial(normalize_again, norm, x.detach(), compiled)


def normalize_again(norm: nn.Module, x: Tensor, compiled: bool) -> Tensor:
    """norm(x), with the bits of `normalize`."""
    with torch.enable_grad():  # without gradients, it would not be compiled
        return fuse(add_and_normalize, compiled)(norm, x)[1].detach()


def add_and_normalize(norm: nn.Module, *parts: Tensor) -> tuple[Tensor, Tensor]:
    """The residual stream x, and norm(x)."""
    x = add_up(*parts)
    return x, norm(x)


def add_up(x_BSD: Tensor, *more: Tensor) -> Tensor:
    """The residual stream: the sum of its parts. All but the first may be [T, D]; the first is added last."""
    return x_BSD + functools.reduce(torch.add, more).view_as(x_BSD) if more else x_BSD
