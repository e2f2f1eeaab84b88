"""Ranks in pipeline, data and expert parallelism, their process groups with options, and the timeout of the world."""

import os
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.runtime import P2P, groups
from moe_dualpipe.runtime.groups import (
    Nccl,
    build_groups,
    product_sms,
    ranks_of,
    rendezvous,
)
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import Placement
from tests.support.ranks import run_ranks


def membership(rank):
    """The groups of two layouts. With NCCL, all ranks of a pipeline meet in its links, even if only some of them share
    an embedding."""
    new_group = dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Nccl, "options", lambda _: "options")
        patch.setattr(dist, "new_group", lambda ranks, **named: new_group(ranks, **named | {"pg_options": None}))
        groups = build_groups(Layout(pp=4, dp=1, ep=1, rank=rank), Placement.mirrored(4), 20, shared_embedding=True)
    assert len(groups.links) == 2 and ranks_of(groups.embedding) == ((0, 3) if rank in (0, 3) else ())
    for link in groups.links:
        dist.barrier(link)
    groups = build_groups(Layout(pp=1, dp=4, ep=2, rank=rank), Placement.straight(1))
    return [ranks_of(group) for group in (groups.experts, groups.expert_replicas, groups.dense)]


def test_groups_of_expert_and_data_parallel_ranks():
    everybody = (0, 1, 2, 3)
    assert run_ranks(4, membership) == [
        [(0, 1), (0, 2), everybody], [(0, 1), (1, 3), everybody],
        [(2, 3), (0, 2), everybody], [(2, 3), (1, 3), everybody],
    ]  # fmt: skip


@pytest.mark.parametrize("shared", [True, False])
def test_each_restart_has_its_own_part_of_a_store_of_all_attempts(monkeypatch, shared):
    """A machine that was added has no restarts, and its torchrun does not share a store: it meets the others."""
    store = dist.HashStore()
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(shared))
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))

    def stores(restarts, *meetings):
        monkeypatch.setattr(groups, "_meetings", iter(meetings))
        return [rendezvous(Launch(0, 0, 2, 1, restarts=restarts), 1.0) for _ in meetings]

    (old, again), (new,) = stores(2, 0, 1), stores(1, 0)
    old.set("address of rank 0", "of a dead process")
    assert new.check(["address of rank 0"]) != shared
    assert not again.check(["address of rank 0"])  # as in a program that trains twice


@pytest.fixture
def created(monkeypatch):
    """The groups that a rank of a world with NCCL creates: ranks, options of NCCL, and timeout."""
    found = []

    def new_group(ranks, pg_options, timeout, backend=None, **_):
        assert backend is None
        found.append((ranks, (pg_options.is_high_priority_stream, vars(pg_options.config)), timeout))
        return FakeGroup(ranks)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=FakeOptions), raising=False)
    monkeypatch.setattr(dist, "ProcessGroup", FakeGroup)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
    return found


@dataclass
class FakeOptions:
    """`ProcessGroupNCCL.Options`, which a build of torch for CPUs does not have."""

    is_high_priority_stream: bool
    config: SimpleNamespace = field(default_factory=SimpleNamespace)


@dataclass
class FakeGroup:
    ranks: list[int]

    def size(self):
        return len(self.ranks)

    def rank(self):
        return 0


EXPERT_OPTIONS = True, {"max_ctas": 20}
PIPELINE_OPTIONS = True, {"min_ctas": 2, "max_ctas": 4}
DEFAULT = False, {}


def test_on_gpus_groups_have_the_timeout_and_the_options_of_their_purpose(created, monkeypatch):
    timeout = timedelta(seconds=12.5)
    groups = build_groups(Layout(pp=2, dp=2, ep=2, rank=0), Placement.mirrored(2), 12.5)
    assert created == [
        # One for each direction of messages.
        *[([0, 2], PIPELINE_OPTIONS, timeout), ([1, 3], PIPELINE_OPTIONS, timeout)] * 3,
        ([0, 1], EXPERT_OPTIONS, timeout), ([2, 3], EXPERT_OPTIONS, timeout),
        ([0, 1, 2, 3], DEFAULT, timeout), ([0, 2], DEFAULT, timeout), ([1, 3], DEFAULT, timeout),
    ]  # fmt: skip
    monkeypatch.setattr(P2P, "_open_links", lambda _: None)
    links = P2P.connect(groups.pipeline, [], torch.device("cuda"), directions=groups.links)
    assert (links.upward, links.downward) == groups.links
    P2P.connect(groups.pipeline, [], torch.device("cuda"))
    assert created[11:] == [([0, 2], PIPELINE_OPTIONS, None)] * 2


def test_products_leave_sms_to_dispatch_and_combine(monkeypatch):
    for sms, expected in ((132, 112), (16, 1)):
        gpu = SimpleNamespace(multi_processor_count=sms)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, gpu=gpu: gpu)
        assert product_sms(torch.device("cuda")) == expected
    assert product_sms(torch.device("cpu")) is None


@pytest.mark.parametrize("local,given,expected", [
    ("2", {}, ["lo", "lo"]), ("1", {}, [None, None]), (None, {}, [None, None]),
    ("2", {"GLOO_SOCKET_IFNAME": "eth1"}, ["eth1", "lo"]),
])  # fmt: skip
def test_processes_of_one_machine_listen_on_its_loopback_interface(monkeypatch, local, given, expected):
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    environment = {name: value for name, value in os.environ.items() if name not in (*names, "LOCAL_WORLD_SIZE")}
    environment |= given if local is None else given | {"LOCAL_WORLD_SIZE": local}
    monkeypatch.setattr(groups.os, "environ", environment)
    monkeypatch.setattr(groups.dist, "init_process_group", lambda *_, **__: None)
    groups.init_world(torch.device("cpu"), Launch(0, 0, 2, 2), store=dist.HashStore())
    assert [environment.get(name) for name in names] == expected
