"""Sums over replicas reach every gradient, and comparisons every bit."""

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from moe_dualpipe.runtime import replicas
from moe_dualpipe.runtime.replicas import ReplicaSet, differing, sum_gradients


def sums(rank):
    replicas.BUCKET_ELEMENTS = 5  # so that every bucket is full after one tensor of three, and one is larger than it
    shapes = {"a": (3,), "b": (3, 1), "c": (7,), "d": (), "missing on 0": (3,), "missing everywhere": (2,)}
    parameters = {name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()}
    for i, (name, parameter) in enumerate(parameters.items()):
        if not (name.endswith("everywhere") or (name.endswith("0") and rank == 0)):
            parameter.grad = torch.full(shapes[name], float(i + 10 * rank))
    sum_gradients(ReplicaSet(parameters, dist.group.WORLD))
    return [parameter.grad.unique().tolist() for parameter in parameters.values()]


def test_every_gradient_is_summed_whatever_bucket_it_is_in():
    expected = [[10.0], [12.0], [14.0], [16.0], [14.0], [0.0]]
    assert run_ranks(2, sums) == [expected, expected]


def one_bit(rank):
    same, other = (nn.Parameter(torch.ones(2, dtype=torch.bfloat16)) for _ in range(2))
    with torch.no_grad():
        other[1] += rank * 2**-7
    return differing(ReplicaSet({"same": same, "other": other}, dist.group.WORLD))


def test_one_bit_of_bf16_is_a_difference():
    assert run_ranks(2, one_bit) == [["other"], ["other"]]
