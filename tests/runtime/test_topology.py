"""The order of ranks that keeps expert groups together, and runs on several machines, which are pretended."""

import random

import pytest
import torch
import torch.distributed as dist

from moe_dualpipe.expert_parallel.gather import gather_objects
from moe_dualpipe.runtime import topology
from moe_dualpipe.runtime.groups import init_world
from moe_dualpipe.runtime.topology import (
    OtherVersionsError,
    RankPlace,
    find_domains,
    machine_limit,
    place,
    placement_order,
)
from moe_dualpipe.training.options import Request
from moe_dualpipe.training.resolve import prepare
from moe_dualpipe.training.run import watched_world
from tests.support.pretended_machines import pretend
from tests.support.ranks import run_ranks
from tests.support.runs import settings


def places_of(machines):
    """machines: a letter for each rank; capitals and small letters of a letter are one domain."""
    return [RankPlace(m, m.lower()) for m in machines]


def groups_of(machines, ep):
    order = placement_order(places_of(machines), ep)
    assert sorted(order) == [*range(len(machines))] and order[0] == 0
    named = "".join(machines[rank] for rank in order)
    return [named[i : i + ep] for i in range(0, len(named), ep)]


@pytest.mark.parametrize(("machines", "ep", "expected"), [
    ("aaaabbbb", 4, ["aaaa", "bbbb"]),
    ("abababab", 4, ["aaaa", "bbbb"]),  # a launcher that deals out ranks in turn
    ("aabbccdd", 4, ["aabb", "ccdd"]),  # no group fits a machine
    ("aabbAABB", 4, ["aaAA", "bbBB"]),  # but it fits a domain
    ("aaaaaaaabbbbbbbbcccccccc", 6, ["aaaaaa", "aabbcc", "bbbbbb", "cccccc"]),  # six of eight: only one group is split
    ("aaabbbAAA", 3, ["aaa", "bbb", "AAA"]),
    ("aaaabbbbAAAABBBB", 16, ["aaaaAAAAbbbbBBBB"]),  # machines of a domain are neighbors
])  # fmt: skip
def test_groups_are_on_few_machines(machines, ep, expected):
    assert groups_of(machines, ep) == expected


def test_no_order_has_more_groups_on_one_machine():
    random.seed(0)
    for _ in range(300):
        ep, machines = random.randint(1, 5), "".join(random.choices("aAbBc", k=60))
        together = [len({*group}) == 1 for group in groups_of(machines, ep)]
        assert sum(together) == sum(machines.count(m) // ep for m in {*machines})


def test_machines_of_a_domain():
    machines = [f"gpu-{n}" for n in (10, 9, 1, 2)]
    assert [p.domain for p in find_domains(machines, 2)] == ["1", "1", "0", "0"]  # gpu-1 gpu-2, gpu-9 gpu-10


@pytest.mark.parametrize(("span", "groups", "top", "limit"), [
    (8, 8, 4, 4), (4, 8, 4, 4), (2, 8, 4, 2), (8, 4, 2, 4), (8, 1, 1, 8), (6, 4, 2, 6),
])  # fmt: skip
def test_node_limited_routing(span, groups, top, limit):
    assert machine_limit(span, groups, top) == limit


# ---- real processes ----


def placed_rank(rank, machines):
    with pytest.MonkeyPatch.context() as monkeypatch:
        placed = place(pretend(rank, machines, monkeypatch), 2, None, 60)
        init_world(torch.device("cpu"), placed.launch, 60, placed.store)
        ranks = gather_objects(machines[rank])
        assert dist.get_rank() == placed.launch.rank
        assert placed.launch.local_rank == machines[:rank].count(machines[rank])
        return "".join(ranks), placed.description


def test_ranks_join_with_their_new_numbers():
    text = "4 ranks on 2 machines; 2 expert groups of 2 ranks: each within one machine; 2 ranks renumbered for that"
    assert run_ranks(4, placed_rank, "abab") == [("aabb", text)] * 4


def refused_rank(rank, out, machines):
    """The error of a run on machines of which the last has another version of torch."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        launch = pretend(rank, machines, monkeypatch)
        if machines[rank] == machines[-1]:
            monkeypatch.setattr(topology, "own_versions", lambda: {"moe-dualpipe": "0.1.0", "torch": "1.0"})
        with (
            pytest.raises(OtherVersionsError) as error,
            watched_world(prepare(Request(settings(out, pp=1, batch_size=8)), launch), launch),
        ):
            raise AssertionError("the run has started")
        return str(error.value)


def test_a_machine_with_another_version_is_named_before_the_run_starts(tmp_path):
    first, *others = run_ranks(4, refused_rank, str(tmp_path), "aabc")
    assert others == [first] * 3
    assert first.startswith("c has torch 1.0, but ") and first.endswith("such as a: install the same version")
