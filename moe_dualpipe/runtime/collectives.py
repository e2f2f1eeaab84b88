"""Reduce-scatter and all-gather of tensors that have one owner each.

A bucket has the tensors of each rank of a group: `bucket[i]` are those that rank i owns. All ranks pass tensors of the
same shapes and one dtype. The owners' parts differ in size, because a tensor is not divided (runtime/replicas.py).

NCCL runs both for parts of any sizes. gloo makes a reduce-scatter of one all-reduce for each rank, and its all-gather
needs equal sizes. So on CPUs, an all-to-all sends each part to its owner, which adds the parts in the order of the
ranks: it sends half as much as an all-reduce, and the sum of an element does not depend on the rest of its bucket. The
owners broadcast what the others gather.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .background import Background

Bucket = Sequence[Sequence[Tensor]]


class ReduceScatter:
    """Starts to add up the tensors of a bucket over the ranks of `group`."""

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, background: Background):
        self.own, rank, num_copies = bucket[group.rank()], group.rank(), 1 if background.streams else group.size()
        parts = [sum(t.numel() for t in tensors) for tensors in bucket]
        self.flat = torch.cat([t.flatten() for tensors in bucket for t in tensors])
        self.received = self.flat.new_empty(num_copies, parts[rank])  # on a CPU, from each rank

        def start() -> list[dist.Work | None]:
            if background.streams is not None:
                return [dist.reduce_scatter(self.received[0], [*self.flat.split(parts)], group=group, async_op=True)]
            sizes = [parts[rank]] * num_copies
            return [dist.all_to_all_single(self.received.view(-1), self.flat, sizes, parts, group=group, async_op=True)]

        self.running = background.start(start)

    def finish(self) -> None:
        """Write the sums into this rank's tensors. `running` must have been waited for."""
        total, *others = self.received
        for other in others:
            total += other
        _copy(total, self.own)


class AllGather:
    """Starts to send this rank's tensors of a bucket to all ranks of `group`."""

    def __init__(self, bucket: Bucket, group: dist.ProcessGroup, background: Background):
        self.bucket, self.rank, self.queued = bucket, group.rank(), background.streams is not None
        own = torch.cat([t.flatten() for t in bucket[self.rank]]) if bucket[self.rank] else None
        some = next(t for tensors in bucket for t in tensors)
        self.flats = [some.new_empty(sum(t.numel() for t in tensors)) for tensors in bucket]
        if own is not None:
            self.flats[self.rank] = own
        self.running = background.start(lambda: self._start(group))

    def _start(self, group: dist.ProcessGroup) -> list[dist.Work | None]:
        if self.queued:
            return [dist.all_gather(self.flats, self.flats[self.rank], group=group, async_op=True)]
        owners = [owner for owner, flat in enumerate(self.flats) if flat.numel()]
        return [dist.broadcast(self.flats[o], group=group, group_src=o, async_op=True) for o in owners]

    def finish(self) -> None:
        """Write what was received into the other ranks' tensors. `running` must have been waited for."""
        for owner, tensors in enumerate(self.bucket):
            if owner != self.rank:
                _copy(self.flats[owner], tensors)


def _copy(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    if tensors:
        parts = flat.split([t.numel() for t in tensors])
        torch._foreach_copy_([*tensors], [part.view_as(t) for part, t in zip(parts, tensors, strict=True)])
