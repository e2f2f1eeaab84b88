"""Sums of gradients over replicas, and checks that replicas are equal."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_dualpipe.runtime import replicas
from moe_dualpipe.runtime.replicas import ReplicaSet, check_equal, sum_gradients
from tests.support.ranks import run_ranks


def sums(rank):
    replicas.BUCKET_ELEMENTS = 5  # a bucket holds one tensor of 3 elements; the tensor of 7 exceeds a bucket
    shapes = {"a": (3,), "b": (3, 1), "c": (7,), "d": (), "missing on 0": (3,), "missing everywhere": (2,)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for i, (name, parameter) in enumerate(parameters.items()):
        if not (name.endswith("everywhere") or (name.endswith("0") and rank == 0)):
            parameter.grad = torch.full(shapes[name], float(i + 10 * rank))
    sum_gradients(ReplicaSet(parameters, dist.group.WORLD))
    return [parameter.grad.unique().tolist() for parameter in parameters.values()]


def test_gradients_in_all_buckets_are_summed():
    expected = [[10.0], [12.0], [14.0], [16.0], [14.0], [0.0]]
    assert run_ranks(2, sums) == [expected, expected]


DEVIATIONS = [
    ([1, 2, 3], [], None),
    ([1, 2, 3], [(2, "w", 0)], "rank 2 deviates from ranks 1, 3 in w: replicas must stay bit-equal"),
    ([1, 2, 3, 4], [(4, "norm", 30), (4, "w", 5), (4, "scale", 1), (4, "more", 2)],
     "rank 4 deviates from ranks 1, 2, 3 in more, norm, scale and 1 more: replicas must stay bit-equal"),
    ([1, 2, 3], [(1, "w", 3), (3, "norm", 3)],
     "ranks 1, 3 deviate from rank 2 in norm, w: replicas must stay bit-equal"),
    ([1, 2], [(2, "scale", 31)], "ranks 1, 2 disagree in scale: replicas must stay bit-equal"),
    ([1, 2, 3, 4], [(1, "w", 3), (2, "w", 3)], "ranks 1, 2, 3, 4 disagree in w: replicas must stay bit-equal"),
]  # fmt: skip
"""The ranks of a group, the changes (rank, parameter, bit of its last element), and the error."""


def deviations(rank):
    for ranks, changes, message in DEVIATIONS:
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        generator = torch.Generator().manual_seed(3)
        shapes = {"w": (7, 5), "norm": (4,), "scale": (), "more": (3,)}
        parameters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
        for changed, name, bit in changes:
            if changed == rank:
                parameters[name].detach().view(-1)[-1:].view(torch.int32).bitwise_xor_(torch.tensor(1 << bit))
        expected = pytest.raises(RuntimeError, match=f"^{message}$") if message else contextlib.nullcontext()
        with expected:
            check_equal(ReplicaSet(parameters, group))  # type: ignore[arg-type]


def test_the_error_names_the_ranks_that_deviate_from_the_majority():
    run_ranks(5, deviations)


def test_buckets_have_the_tensors_in_order_one_dtype_and_a_bounded_size(monkeypatch):
    monkeypatch.setattr(replicas, "BUCKET_ELEMENTS", 5)
    dtypes = [torch.float32] * 4 + [torch.bfloat16] * 2 + [torch.float32]
    tensors = [torch.zeros(size, dtype=dtype) for size, dtype in zip((2, 3, 1, 7, 2, 2, 1), dtypes, strict=True)]
    found = [*replicas.buckets(tensors)]
    assert [id(t) for bucket in found for t in bucket] == [*map(id, tensors)]
    assert [len(bucket) for bucket in found] == [2, 1, 1, 2, 1]
