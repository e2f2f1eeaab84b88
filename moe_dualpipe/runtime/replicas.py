"""Replicas of parameters and buffers on several ranks, the check that they stay equal, and their owners (ZeRO-1).

Data parallelism creates replicas, and so does DualPipe, which keeps every stage on two mirrored ranks. Both are treated
alike: a replica set is a set of parameters with the process group of the ranks that hold them.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapreplace
from itertools import zip_longest
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import without_frames
from ..expert_parallel.gather import sum_over_ranks
from ..expert_parallel.parameters import ExpertIds, expert_ids, global_tensors
from ..messages import list_ranks
from .checksum import checksum
from .exact_sum import from_words, to_words
from .groups import Groups
from .shared_errors import raise_on_all_ranks


@dataclass(frozen=True)
class ReplicaSet:
    """Parameters or buffers by global name. Every rank of `group` holds a copy; None: only this rank.

    They are sorted by name, because the ranks of a group build their stages in different orders.
    """

    parameters: Mapping[str, Tensor]
    group: dist.ProcessGroup | None
    experts: Mapping[str, ExpertIds] = field(default_factory=dict)
    """The experts in each of these parameters; empty if they are not experts."""
    rule: str = "replicas must stay bit-equal"
    """What an error says about replicas that differ."""
    shared: bool = False
    """Whether several stages hold these parameters, so that ranks with different stages have replicas."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(sorted(self.parameters.items())))

    @property
    def num_replicas(self) -> int:
        return 1 if self.group is None else self.group.size()

    def fill_missing_gradients(self, names: Iterable[str]) -> None:
        """Set missing gradients of these parameters to zero."""
        for parameter in (self.parameters[name] for name in names):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)

    def only(self, trained: bool) -> "ReplicaSet":
        """The parameters that are trained, or those that are frozen (`requires_grad=False`)."""
        return replace(self, parameters={n: p for n, p in self.parameters.items() if p.requires_grad == trained})


def replica_sets(
    stages: Collection[nn.Module], groups: Groups, shared: Collection[nn.Parameter] = ()
) -> list[ReplicaSet]:
    """Divide the parameters of this rank's stages into three sets: dense, experts, and `shared`.

    Parameter names must be global. shared: the parameters that all ranks of `groups.embedding` hold.
    """
    experts = {name: ids for stage in stages for name, ids in expert_ids(stage).items()}
    named = {name: p for stage in stages for name, p in stage.named_parameters()}
    ends = {name for name, p in named.items() if groups.embedding and any(p is other for other in shared)}
    dense = {name: p for name, p in named.items() if name not in experts and name not in ends}
    return [
        ReplicaSet(dense, groups.dense),
        ReplicaSet({name: p for name, p in named.items() if name in experts}, groups.expert_replicas, experts),
        ReplicaSet({name: named[name] for name in ends}, groups.embedding, shared=True),
    ]


def gradient_norm(gradients: Sequence[Tensor], device: torch.device) -> Tensor:
    """The 2-norm of the gradients of all ranks in fp32, bit-equal on all ranks. Collective.

    gradients: those that this rank owns, so that every parameter of the model counts once. It does not matter, for any
    bit, which rank owns which of them.
    """
    wide = [grad if grad.itemsize >= 4 else grad.float() for grad in gradients]
    norms = [norm.float() for norm in torch._foreach_norm(wide)] if wide else []
    words = to_words(torch.stack(norms).square() if norms else torch.zeros(0, device=device))
    return from_words(sum_over_ranks(words)).sqrt().float()


def check_frozen(sets: Sequence[ReplicaSet]) -> None:
    """Raise ValueError on all ranks unless every parameter is frozen on all replicas or on none. Collective."""
    # First check all sets: their groups differ, so a rank that raised after the first would leave others waiting.
    faults = [_frozen_fault(replicas) for replicas in sets]
    raise_on_all_ranks(next(filter(None, faults), ""))


def _frozen_fault(replicas: ReplicaSet) -> str:
    """The error for a parameter that is frozen on some replicas only; "" if there is none. Collective."""
    if replicas.group is None or not replicas.parameters:
        return ""
    parameters = replicas.parameters.values()
    trained_P = torch.tensor([p.requires_grad for p in parameters], dtype=torch.int64)
    dist.all_reduce(trained_P, group=replicas.group)
    mixed = [
        n for n, count in zip(replicas.parameters, trained_P.tolist(), strict=True) if count % replicas.num_replicas
    ]
    if not mixed:
        return ""
    ranks = ", ".join(map(str, dist.get_process_group_ranks(replicas.group)))
    more = f" and {len(mixed) - 1} more" if len(mixed) > 1 else ""
    what = f"{mixed[0]}{more}, replicated on ranks {ranks}"
    return f"{what}: frozen on some ranks and trained on others; set requires_grad alike on all of them"


@torch.no_grad()
def gather_checksums(replicas: ReplicaSet) -> Tensor | None:
    """The checksums of all replicas, [replicas, parameters]; None without replicas. Collective.

    Does not block the host: compute it while the device is busy, and compare it later.
    """
    if replicas.group is None or not replicas.parameters:
        return None
    own_P = torch.stack([checksum(parameter) for parameter in replicas.parameters.values()])
    sums_RP = own_P.new_empty(replicas.num_replicas, len(own_P))
    dist.all_gather(list(sums_RP.unbind()), own_P, group=replicas.group)
    return sums_RP


def differing(replicas: ReplicaSet, sums_RP: Tensor | None = None) -> dict[str, list[int]]:
    """The parameters that are not bit-equal on all replicas, with the global ranks that deviate.

    sums_RP: from `gather_checksums`; None: gather them now, which is collective. Returns the same on all ranks. A rank
    deviates if its value differs from that of more than half of the replicas; if there is no such majority, as with two
    replicas, all ranks deviate.
    """
    sums_RP = gather_checksums(replicas) if sums_RP is None else sums_RP
    if replicas.group is None or sums_RP is None:
        return {}
    ranks = dist.get_process_group_ranks(replicas.group)
    found = {}
    for name, sums_R in zip(replicas.parameters, sums_RP.T.tolist(), strict=True):
        value, count = Counter(sums_R).most_common(1)[0]
        majority = value if 2 * count > len(sums_R) else None
        if deviating := [rank for rank, value in zip(ranks, sums_R, strict=True) if value != majority]:
            found[name] = deviating
    return found


def check_equal(replicas: ReplicaSet, sums_RP: Tensor | None = None) -> None:
    """Raise RuntimeError with parameters and ranks unless all replicas are bit-equal. sums_RP: as for `differing`."""
    if found := differing(replicas, sums_RP):
        assert replicas.group is not None
        names, ranks = list(found), sorted(set().union(*found.values()))
        others = sorted(set(dist.get_process_group_ranks(replicas.group)) - set(ranks))
        what = f"deviate{'s' * (len(ranks) == 1)} from {list_ranks(others)}" if others else "disagree"
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise without_frames(
            RuntimeError(f"{list_ranks(ranks)} {what} in {', '.join(names[:3])}{more}: {replicas.rule}")
        )


# ---- Owners ----
#
# ZeRO-1 (arXiv 1910.02054): each replica stores optimizer state for a part of the weights, and updates only that part.
#
# Each tensor that has a name in a checkpoint (a dense parameter, or one expert of a stack) has one owner. So updates
# and checkpoint files do not depend on who owns what, but one very large tensor, such as the embedding, is not divided.
#
# torch's ZeroRedundancyOptimizer divides the state of the tensors that it sends. With it, the fp32 master weights of a
# bf16 model would remain on every rank. It also treats stacked experts as one tensor, and gathers all state to save it.

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
