"""ZeRO-1 (arXiv 1910.02054): each replica stores optimizer state for a part of the weights, and updates only that part.

Each tensor that has a name in a checkpoint (a dense parameter, or one expert of a stack) has one owner. So updates and
checkpoint files do not depend on who owns what, but one very large tensor, such as the embedding, is not divided.

torch's ZeroRedundancyOptimizer divides the state of the tensors that it sends. With it, the fp32 master weights of a
bf16 model would remain on every rank. It also treats stacked experts as one tensor, and gathers all state to save it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapreplace

import torch
import torch.distributed as dist
from torch import Tensor

from ..expert_parallel.parameters import global_tensors
from .replicas import ReplicaSet, buckets


@dataclass(frozen=True, slots=True, eq=False)
class OwnedTensor:
    """`weight` is a view of the model's parameter called `parameter`; `owner`, a rank of the group, updates it."""

    parameter: str
    weight: Tensor
    owner: int


class Shards:
    """The tensors of a replica set with their owners, by global name. Without `divide`, this rank owns all."""

    def __init__(self, replicas: ReplicaSet, divide: bool):
        self.group = replicas.group if divide else None
        weights = {
            name: (parameter, view)
            for parameter, tensor in replicas.parameters.items()
            for name, view in global_tensors(parameter, tensor.detach(), replicas.experts.get(parameter))
        }
        num_owners = self.group.size() if self.group else 1
        owners = assign_owners({name: view.numel() for name, (_, view) in weights.items()}, num_owners)
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.tensors = {name: OwnedTensor(parameter, view, owners[name]) for name, (parameter, view) in weights.items()}

    @property
    def owned(self) -> dict[str, OwnedTensor]:
        return {name: tensor for name, tensor in self.tensors.items() if tensor.owner == self.rank}

    @torch.no_grad()
    def broadcast_weights(self) -> None:
        """Send the updated weights from their owners to all replicas. Collective."""
        if self.group is None:
            return
        for owner in range(self.group.size()):
            weights = [tensor.weight for tensor in self.tensors.values() if tensor.owner == owner]
            for bucket in buckets(weights):
                flat = torch.cat([weight.flatten() for weight in bucket])
                dist.broadcast(flat, group=self.group, group_src=owner)
                if owner != self.rank:
                    for weight, new in zip(bucket, flat.split([w.numel() for w in bucket]), strict=True):
                        weight.copy_(new.view_as(weight))


def assign_owners(sizes: Mapping[str, int], num_owners: int) -> dict[str, int]:
    """Assign an owner to every name, the same on all ranks: the largest first, each to the owner with the least so far.

    Two owners differ by at most one tensor. Example for 2 owners: {"a": 5, "b": 3, "c": 3} -> {"a": 0, "b": 1, "c": 1}.
    """
    loads, owners = [(0, owner) for owner in range(num_owners)], {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, owners[name] = loads[0]
        heapreplace(loads, (load + sizes[name], owners[name]))
    return owners


def elements_per_owner(sizes: Mapping[str, int], num_owners: int) -> list[int]:
    """The number of elements of each owner. Example for 2 owners: {"a": 5, "b": 3, "c": 3} -> [5, 6]."""
    totals = [0] * num_owners
    for name, owner in assign_owners(sizes, num_owners).items():
        totals[owner] += sizes[name]
    return totals
