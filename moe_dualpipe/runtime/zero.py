"""ZeRO-1 (arXiv 1910.02054): each replica stores optimizer state for a part of the weights, and updates only that part.

Each tensor that has a name in a checkpoint (a dense parameter, or one expert of a stack) has one owner. So updates and
checkpoint files do not depend on who owns what, but one very large tensor, such as the embedding, is not divided.

torch's ZeroRedundancyOptimizer divides the state of the tensors that it sends. With it, the fp32 master weights of a
bf16 model would remain on every rank. It also treats stacked experts as one tensor, and gathers all state to save it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heapreplace
from itertools import zip_longest
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from ..expert_parallel.parameters import global_tensors
from .replicas import ReplicaSet

BUCKET_BYTES = 25 * 2**20
Key = TypeVar("Key", str, tuple[str, int])


@dataclass(frozen=True, slots=True, eq=False)
class OwnedTensor:
    """`weight` is a view of the model's parameter called `parameter`; `owner`, a rank of the group, updates it."""

    parameter: str
    weight: Tensor
    owner: int


class Shards:
    """The tensors of a replica set with their owners, by global name.

    divide: this rank updates only the tensors that it owns. Otherwise it updates all. Gradients are summed by their
    owners in both cases, in the same order.
    """

    def __init__(self, replicas: ReplicaSet, divide: bool):
        self.group, self.divide, self.replicas = replicas.group, divide, replicas
        weights = {
            (parameter, i): (name, view)
            for parameter, tensor in replicas.parameters.items()
            for i, (name, view) in enumerate(
                global_tensors(parameter, tensor.detach(), replicas.experts.get(parameter))
            )
        }
        self.num_owners = self.group.size() if self.group else 1
        # By the place of an expert on its rank, not by its id: so ranks with other experts divide them alike.
        owners = assign_owners({place: view.numel() for place, (_, view) in weights.items()}, self.num_owners)
        self.rank = dist.get_rank(self.group) if self.group else 0
        self.tensors = {name: OwnedTensor(place[0], view, owners[place]) for place, (name, view) in weights.items()}

        self.owned = {name: tensor for name, tensor in self.tensors.items() if tensor.owner == self.rank}
        self.updated = self.owned if divide else self.tensors  # by this rank
        self.updated_parameters = {tensor.parameter for tensor in self.updated.values()}

    def gradients(self, parameters: Iterable[str]) -> dict[str, Tensor]:
        """The gradients of all tensors of these parameters, by global name. They are views."""
        found = {}
        for name in parameters:
            grad = self.replicas.parameters[name].grad
            assert grad is not None, f"{name} has no gradient"
            found |= global_tensors(name, grad, self.replicas.experts.get(name))
        return found

    def buckets(self, sizes: Mapping[str, int]) -> list[list[list[str]]]:
        """Divide tensors into buckets of at most `BUCKET_BYTES`, or of one tensor per owner; `bucket[i]` are owner i's.

        sizes: the bytes of each tensor, in order. The owners' parts of a bucket have about the same size.
        """
        parts: list[list[list[str]]] = [[] for _ in range(self.num_owners)]
        filled = [0] * self.num_owners
        for name, size in sizes.items():
            owner = self.tensors[name].owner
            if not parts[owner] or (filled[owner] + size) * self.num_owners > BUCKET_BYTES:
                parts[owner].append([])
                filled[owner] = 0
            parts[owner][-1].append(name)
            filled[owner] += size
        return [[*bucket] for bucket in zip_longest(*parts, fillvalue=[])]


def assign_owners(sizes: Mapping[Key, int], num_owners: int) -> dict[Key, int]:
    """Assign an owner to every name, the same on all ranks: the largest first, each to the owner with the least so far.

    Two owners differ by at most one tensor. Example for 2 owners: {"a": 5, "b": 3, "c": 3} -> {"a": 0, "b": 1, "c": 1}.
    """
    loads, owners = [(0, owner) for owner in range(num_owners)], {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, owners[name] = loads[0]
        heapreplace(loads, (load + sizes[name], owners[name]))
    return owners
