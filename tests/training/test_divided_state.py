"""Optimizer state divided among replicas (ZeRO-1): same results, and one owner per tensor."""

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_dualpipe.expert_parallel.parameters import ExpertIds
from moe_dualpipe.runtime.optimizer import Optimizer
from moe_dualpipe.runtime.replicas import ReplicaSet
from moe_dualpipe.runtime.zero import assign_owners
from moe_dualpipe.training.config import OptimizerConfig
from tests.support.ranks import run_ranks


def test_assign_examples_and_balance():
    assert assign_owners({"a": 5, "b": 3, "c": 3}, 2) == {"a": 0, "b": 1, "c": 1}
    assert assign_owners({"only": 7}, 3) == {"only": 0}
    draw = random.Random(0)
    for owners, count in itertools.product((1, 2, 3, 8), (1, 5, 40)):
        sizes = {f"p{i}": draw.choice((1, 7, 128, 5000, 5001)) for i in range(count)}
        chosen = assign_owners(sizes, owners)
        assert chosen == assign_owners(dict(reversed(sizes.items())), owners)
        loads = [sum(sizes[name] for name in sizes if chosen[name] == owner) for owner in range(owners)]
        assert max(loads) - min(loads) <= max(sizes.values())
        mean = sum(sizes.values()) / owners  # Graham's bound for the largest first (1969)
        assert max(loads) <= (4 / 3) * max(mean, *sizes.values())


SHAPES = {"embedding": (13, 6), "layers.0.qkv": (10, 6), "layers.0.out": (6, 5), "layers.0.norm": (6,), "scale": ()}
EXPERTS = {"layers.1.mlp.experts.gate_up": (3, 8, 6), "layers.1.mlp.experts.down": (3, 6, 4)}
STACKED = {"layers.0.qkv": (4, 3, 3), "layers.1.mlp.experts.gate_up": (4, 4)}


def make_sets(dtype, seed, groups):
    """The replica sets of a rank: dense parameters, experts drawn from `seed`, and a single parameter."""
    sets = []
    for shapes, salt, group in zip((SHAPES, EXPERTS, {"lonely": (3, 2)}), (0, seed, 0), groups, strict=True):
        generator = torch.Generator().manual_seed(salt)
        order = sorted(shapes, reverse=bool(group and dist.get_rank() % 2))  # stages are built in different orders
        values = {name: torch.randn(shapes[name], generator=generator).to(dtype) for name in sorted(shapes)}
        ids = range(3 * seed, 3 * seed + 3)
        experts = {name: ExpertIds(ids, "stacked", f"{name}.*") for name in order if shapes is EXPERTS}
        sets.append(ReplicaSet({name: nn.Parameter(values[name]) for name in order}, group, experts))
    return sets


def steps(sets, config, zero, seed):
    """Do three updates from random gradients, which are equal on all replicas. Returns the optimizer."""
    optimizer = Optimizer(sets, config, zero, STACKED, {"embedding"})
    for step in range(3):
        for one, salt in zip(sets, (0, seed, 0), strict=True):
            generator = torch.Generator().manual_seed(100 * step + salt)
            for parameter in one.parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(0.01 * (step + 1), torch.tensor(0.3, dtype=torch.float64))
    return optimizer


def sharded_and_not(rank, spread):
    """Check that divided and whole state give equal weights, with every optimizer. Returns names and sizes."""
    size = dist.get_world_size()
    seed, world = rank % spread, dist.group.WORLD
    members = [[r for r in range(size) if r % spread == s] for s in range(spread)]
    peers = [dist.new_group(ranks) for ranks in members][seed] if size > spread else None
    shares = {}
    for dtype, name in itertools.product((torch.float32, torch.bfloat16), ("adamw", "muon")):
        config, groups = OptimizerConfig(name=name, weight_decay=0.4), (world, peers, world)
        whole_sets, sets = make_sets(dtype, seed, groups), make_sets(dtype, seed, groups)
        whole = steps(whole_sets, config, False, seed)
        sharded = steps(sets, config, True, seed)
        for one, other in zip(whole_sets, sets, strict=True):
            for parameter in one.parameters:
                assert torch.equal(one.parameters[parameter], other.parameters[parameter]), (rank, dtype, parameter)
        expected = whole.tensors()
        for key, tensor in sharded.tensors().items():
            assert torch.equal(tensor, expected[key]), (rank, dtype, key)
        shares[str(dtype), name] = ([*sharded.tensors()], [*expected], sharded.state_bytes, whole.state_bytes)
    return shares


@pytest.mark.parametrize("ranks,spread", [(2, 1), (2, 2), (4, 2)])
@pytest.mark.quick("2-2")
def test_divided_state_gives_equal_steps_and_every_tensor_has_one_owner(ranks, spread):
    seen = run_ranks(ranks, sharded_and_not, spread)
    for key, (*_, all_bytes) in seen[0].items():
        wholes = {name for rank in range(ranks) for name in seen[rank][key][1]}
        owned = [name for rank in range(ranks) for name in seen[rank][key][0]]
        assert sorted(owned) == sorted(wholes), key
        dense = {("torch.float32", "adamw"): 2, ("torch.bfloat16", "adamw"): 3}.get(key)
        if dense:  # fp32 numbers per weight, over all ranks
            weights = 13 * 6 + 60 + 30 + 6 + 1 + 6 + spread * 3 * (48 + 24)
            assert sum(seen[rank][key][2] for rank in range(ranks)) == 4 * dense * weights
        most = max(seen[rank][key][2] for rank in range(ranks))
        assert most < all_bytes
        if dense and spread < ranks:  # experts have replicas, too
            assert most < 0.6 * all_bytes
