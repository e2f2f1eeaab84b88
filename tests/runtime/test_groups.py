"""Ranks in pipeline, data and expert parallelism, their process groups, and the timeout of the world."""

from datetime import timedelta

import torch

from moe_dualpipe.runtime.groups import Layout, build_groups, init_world
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.schedule import Placement
from tests.support.ranks import run_ranks


def test_expert_parallel_ranks_are_neighbours():
    layouts = [Layout(pp=2, dp=4, ep=2, rank=r) for r in range(8)]
    assert [(x.pp_rank, x.dp_rank) for x in layouts] == [(p, d) for p in range(2) for d in range(4)]
    assert all(x.world_rank(x.pp_rank, x.dp_rank) == x.rank for x in layouts)


def membership(rank):
    groups = build_groups(Layout(pp=1, dp=4, ep=2, rank=rank), Placement.straight(1))
    members = torch.distributed.get_process_group_ranks
    return members(groups.experts), members(groups.expert_replicas), members(groups.dense)


def test_groups_of_expert_and_data_parallel_ranks():
    everybody = [0, 1, 2, 3]
    assert run_ranks(4, membership) == [
        ([0, 1], [0, 2], everybody), ([0, 1], [1, 3], everybody),
        ([2, 3], [0, 2], everybody), ([2, 3], [1, 3], everybody),
    ]  # fmt: skip


def test_the_timeout_is_passed_to_torch(monkeypatch):
    passed = []
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda *_, timeout, **__: passed.append(timeout))
    init_world(torch.device("cpu"), Launch(0, 0, 1, 1), 12.5)
    init_world(torch.device("cpu"), Launch(0, 0, 2, 2), 12.5)
    assert passed == [timedelta(seconds=12.5)] * 2
