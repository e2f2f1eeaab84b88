"""Checks that replicas are equal, and means of their buffers."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_dualpipe.runtime.buffers import Buffers
from moe_dualpipe.runtime.groups import Groups
from moe_dualpipe.runtime.replicas import ReplicaSet, check_equal
from tests.support.ranks import run_ranks

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


class Statistics(nn.Module):
    averaged_buffers = ("seen",)

    def __init__(self, rank):
        super().__init__()
        values = torch.randn(200, generator=torch.Generator().manual_seed(rank))
        self.register_buffer("seen", values.bfloat16())


def averaged(rank):
    layer = Statistics(rank)
    buffers = Buffers([layer], Groups(dense=dist.group.WORLD))
    before = buffers.copies()
    buffers.average()
    found = layer.get_buffer("seen").tolist()
    buffers.restore(before)
    assert torch.equal(layer.get_buffer("seen"), Statistics(rank).get_buffer("seen"))
    return found


def test_a_mean_in_16_bits_is_that_of_fp32_rounded_once():
    own = [Statistics(rank).get_buffer("seen") for rank in range(3)]
    assert run_ranks(3, averaged) == [torch.stack(own).double().mean(0).bfloat16().tolist()] * 3
