"""Replicas of the same parameters on several ranks: summing their gradients, and proving that they stay equal.

Data parallelism makes replicas, and so does DualPipe, which keeps every stage on two mirrored ranks. Both are the same
thing here: a set of parameters, and the process group of the ranks that hold them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

BUCKET_ELEMENTS = 16 * 2**20  # gradients are summed in pieces of at most this many elements, or one parameter


@dataclass(frozen=True)
class ReplicaSet:
    """Parameters, by global name, that every rank of `group` holds a copy of. None: this rank alone.

    They are kept in order of their names, because the ranks of a group build their stages in different orders.
    """

    parameters: Mapping[str, nn.Parameter]
    group: dist.ProcessGroup | None

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(sorted(self.parameters.items())))

    @property
    def num_replicas(self) -> int:
        return 1 if self.group is None else self.group.size()


def sum_gradients(replicas: ReplicaSet) -> None:
    """Replace every gradient by the sum over the replicas; a missing gradient counts as zero. Collective."""
    for parameter in replicas.parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype or parameter.dtype)
    if replicas.group is None:
        return
    grads = [parameter.grad for parameter in replicas.parameters.values() if parameter.grad is not None]
    for bucket in buckets(grads):
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, group=replicas.group)
        for grad, total in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(total.view_as(grad))


def gradient_norm(sets: list[ReplicaSet], device: torch.device) -> Tensor:
    """The 2-norm of all gradients of the model, every parameter counted once; fp64, the same on all ranks. Collective.

    Call it after `sum_gradients`: a replica contributes its share, so the sum over the world counts each once.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    for replicas in sets:
        for parameter in replicas.parameters.values():
            if parameter.grad is not None:
                total += parameter.grad.double().square().sum() / replicas.num_replicas
    dist.all_reduce(total)
    return total.sqrt()


@torch.no_grad()
def differing(replicas: ReplicaSet) -> list[str]:
    """The names of parameters that are not bit-equal on all replicas; the same list on all of them. Collective."""
    if replicas.group is None:
        return []
    flags = []
    for parameter in replicas.parameters.values():
        bits = _bits(parameter)
        highest = bits.clone()
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=replicas.group)
        flags.append((bits != highest).any())
    if not flags:
        return []
    different = torch.stack(flags).int()
    dist.all_reduce(different, op=dist.ReduceOp.MAX, group=replicas.group)
    return [name for name, flag in zip(replicas.parameters, different.tolist(), strict=True) if flag]


def check_equal(replicas: ReplicaSet) -> None:
    """Raise RuntimeError, naming parameters and ranks, unless all replicas are bit-equal. Collective."""
    if names := differing(replicas):
        assert replicas.group is not None
        ranks = dist.get_process_group_ranks(replicas.group)
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RuntimeError(
            f"replicas on ranks {ranks} differ in {', '.join(names[:3])}{more}: they must stay bit-equal"
        )


def _bits(tensor: Tensor) -> Tensor:
    """The bits of a floating-point tensor as int32, which every backend can reduce."""
    if tensor.element_size() == 2:
        return tensor.contiguous().view(torch.int16).int()
    return tensor.contiguous().view(torch.int32)


def buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in order, in lists of at most `BUCKET_ELEMENTS` elements or one tensor: to be sent as one."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > BUCKET_ELEMENTS:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
