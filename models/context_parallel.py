"""Context parallelism: cp ranks share each sequence, and every layer but attention works on a rank's own positions.

A sequence is divided into 2 cp slices. Rank i holds slices i and 2 cp - 1 - i ("zigzag"), so all ranks have the same
work in causal attention. Before attention, the keys and values of all ranks are gathered: a transfer between two
segments, which hides behind the other chunk like every other. In backward, each rank gets the sum of the gradients of
its own keys.

S positions of a sequence, s = S / cp positions of a rank, C width, N ranks, P numbers in a message.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_dualpipe.expert_parallel import Loopback, Pending
from moe_dualpipe.expert_parallel.exchange import AsyncResult
from moe_dualpipe.overlap import Collective

KEYS = "keys"
"""The name of the transfer."""


class Context:
    """The place of this rank among those that share its sequences, and their transfers.

    group: the ranks, in order. gather: a Collective of tensors [..., s, C] of one dtype; it returns them with the
    positions of all ranks, [..., S, C], in the order of the sequence. Its dual sums over ranks, in fp32 at least.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.size, self.rank = group, group.size(), dist.get_rank(group)

    @property
    def slices(self) -> tuple[int, int]:
        """The numbers of this rank's slices."""
        return self.rank, 2 * self.size - 1 - self.rank

    def cut(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's positions of `x`, which has all positions in the dimension `dim`."""
        parts = x.chunk(2 * self.size, dim)
        return torch.cat([parts[i] for i in self.slices], dim)

    def join(self, x: Tensor) -> Tensor:
        """The reverse of `cut` along the last but one dimension. All ranks must call it."""
        return self._gather(x).wait()[0]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of the tensors `x` of all ranks. All ranks must call it."""
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total

    @cached_property
    def gather(self) -> Collective:
        return Collective(self._gather, self._sum_back, joint=True)

    def _gather(self, *xs: Tensor) -> Pending[tuple[Tensor, ...]]:
        own = torch.cat([x.flatten() for x in xs])
        all_NP = own.new_empty(self.size, len(own))
        return AsyncResult([self._all_gather(all_NP, own)], partial(self._in_order, all_NP, own, [x.shape for x in xs]))

    def _in_order(self, all_NP: Tensor, _sent: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
        received = []
        for rows, shape in zip(all_NP.split([shape.numel() for shape in shapes], 1), shapes, strict=True):
            first, second = rows.view(self.size, *shape).chunk(2, dim=-2)
            received.append(torch.cat([first, second.flip(0)]).movedim(0, -3).flatten(-3, -2))
        return tuple(received)

    def _sum_back(self, *grads: Tensor) -> Pending[tuple[Tensor, ...]]:
        sent, shapes = [], []
        for grad in grads:
            slices = grad.unflatten(-2, (2 * self.size, -1)).movedim(-3, 0)
            by_rank = torch.cat([slices[: self.size], slices[self.size :].flip(0)], dim=-2)
            sent.append(by_rank.flatten(1))
            shapes.append(by_rank.shape[1:])
        sent_NP = torch.cat(sent, 1)
        received_NP = torch.empty_like(sent_NP)
        work = self._all_to_all(received_NP, sent_NP)
        return AsyncResult([work], partial(self._summed, received_NP, sent_NP, shapes))

    def _summed(self, received_NP: Tensor, _sent: Tensor, shapes: Sequence[torch.Size]) -> tuple[Tensor, ...]:
        total_P = received_NP.sum(0, dtype=torch.promote_types(received_NP.dtype, torch.float32)).to(received_NP.dtype)
        parts = total_P.split([shape.numel() for shape in shapes])
        return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))

    def _all_gather(self, received: Tensor, sent: Tensor) -> Any:
        return dist.all_gather([*_bytes(received).unbind()], _bytes(sent), group=self.group, async_op=True)

    def _all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        return dist.all_to_all_single(_bytes(received), _bytes(sent), group=self.group, async_op=True)


@contextmanager
def without_context(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In the `with` block, each rank computes whole sequences, as in generation."""
    found = [each for module in modules for each in module.modules() if getattr(each, "context", None) is not None]
    contexts = [module.context for module in found]
    try:
        for module in found:
            module.context = None  # type: ignore[assignment]
        yield
    finally:
        for module, context in zip(found, contexts, strict=True):
            module.context = context


class LoopbackContext(Context):
    """The first of `size` virtual ranks with the same rows, over the modeled link of `backend`, on a CPU."""

    def __init__(self, size: int, backend: Loopback):
        self.size, self.rank, self.backend = size, 0, backend

    def _all_gather(self, received: Tensor, sent: Tensor) -> Any:
        return self.backend.transfer(received.copy_(sent.expand_as(received)), _num_bytes(received[1:]))

    def _all_to_all(self, received: Tensor, sent: Tensor) -> Any:
        return self.backend.transfer(received.copy_(sent), _num_bytes(received[1:]))


def transfers_at_first(cp: int, keys: int, hidden: int, top_k: int, ep: int) -> int:
    """`Comm.opens` of a combine. keys: the numbers of a position that are gathered.

    Attention is the longest computation. Of the two orders (overlap/engine.py), one exposes the keys of a layer twice,
    and the other one dispatch, whose rows travel to at most `top_k` other ranks. So this compares them.
    """
    if cp == 1:
        return 1
    return 0 if 2 * (cp - 1) * keys > min(top_k, ep - 1) * hidden else 2


def _num_bytes(x: Tensor) -> int:
    return x.numel() * x.itemsize


def check_context(cp: int, length: int) -> None:
    """Raise ValueError, with the nearest length that fits, unless sequences of `length` have 2 cp equal slices."""
    if cp > 1 and length % (2 * cp):
        use = max(1, round(length / (2 * cp))) * 2 * cp
        raise ValueError(f"--cp {cp} divides each sequence into {2 * cp} slices: got --seq-len {length}, use {use}")


def _bytes(x: Tensor) -> Tensor:
    """gloo does not send every dtype."""
    return x.view(torch.uint8)
