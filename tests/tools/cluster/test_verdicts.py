"""Machines and links with made-up problems: each is found, named, and has a way out. Equal ones have none."""

import dataclasses
from itertools import combinations

import pytest

from moe_dualpipe.tools.cluster import Facts, LinkSpeed, Report, cluster_report, find_problems
from moe_dualpipe.tools.cluster.facts import machines_of
from moe_dualpipe.tools.cluster.links import rounds_of
from moe_dualpipe.tools.cluster.verdicts import device_of, find_link_problems, kinds_of
from tests.support.runs import ROOT

GB, GIB = 10**9, 2**30
ALIKE = {
    "Python": "3.12.3", "torch": "2.11.0", "triton": "3.6.0", "NCCL": "2.28.9",
    "driver": "570.86.10", "GPUs": "2 x NVIDIA H200, 141 GiB",
    "InfiniBand ports": "1 x ACTIVE, 400 Gb/sec", "number of processes": "2", "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_IB_TC": "106",
}  # fmt: skip
GOOD = Facts(
    alike=ALIKE, num_gpus=2, gpu_files=2, gpu_used=0.01, address="10.0.0.1", shm=64 * GIB, open_files=65536,
    local_size=2, clock=0.0, sees_mark=True, folder="/runs", free=9 * 10**12,
)  # fmt: skip


def cluster(*changes, ranks=2):
    """The facts of machines a, b, c ..., each with two ranks and the good facts, but for its changes."""
    return [
        dataclasses.replace(
            GOOD, host="abcdef"[i], rank=ranks * i + j, local_rank=j, local_size=ranks,
            **change | {"alike": ALIKE | change.get("alike", {})},
        )
        for i, change in enumerate(changes)
        for j in range(ranks)
    ]  # fmt: skip


def lines(facts, **needs):
    return [str(problem) for problem in find_problems(facts, len(facts), **needs)]


def test_equal_machines_have_no_problem():
    assert lines(cluster({}, {}, {})) == lines(cluster({}, {"clock": 1.5}, {})) == []
    assert lines(cluster({}, {"alike": {"NCCL_SOCKET_IFNAME": "eth1", "NCCL_DEBUG": "INFO"}}, {})) == []
    assert device_of(cluster({}, {}), "auto") == "cuda"


ONE = {
    "version": ({"alike": {"torch": "2.13.0"}}, "torch 2.13.0, but 2.11.0 on 4 other ranks", True),
    "driver": ({"alike": {"driver": "535.1"}}, "driver 535.1, but 570.86.10 on 4 other", False),
    "no driver": ({"alike": {"driver": ""}}, "driver none, but 570.86.10 on 4 other", False),
    "fewer GPUs": ({"num_gpus": 1}, "2 processes, but 1 GPU: start at most 1 with --nproc-per-node", True),
    "no CUDA": ({"num_gpus": 0, "gpu_used": None}, "2 GPUs, but torch finds none: it is built without CUDA", True),
    "other GPU": ({"alike": {"GPUs": "2 x A100"}}, "GPUs 2 x A100, but 2 x NVIDIA H200, 141 GiB on 4 other", False),
    "used GPU": ({"gpu_used": 0.286}, "29% of the memory of GPU 0, 1 is in use: end the other program", False),
    "setting": ({"alike": {"NCCL_IB_TC": "0"}}, "NCCL_IB_TC 0, but 106 on 4 other ranks", False),
    "InfiniBand": ({"alike": {"InfiniBand ports": "1 x DOWN"}}, "InfiniBand ports 1 x DOWN, but", False),
    "locked memory": ({"locked_memory": 8 << 20}, "it may lock 8 MiB of memory, and InfiniBand needs more", False),
    "loopback": ({"address": "127.0.1.1"}, "its name resolves to 127.0.1.1, so gloo would listen where other", True),
    "no address": ({"address": ""}, "its name does not resolve, so gloo", True),
    "clock": ({"clock": 3600.2}, "its clock is 3,600.2 s ahead of rank 0's: synchronize", False),
    "disk": ({"unwritable": "/runs: Read-only"}, "the output folder cannot be written: /runs: Read-only", False),
    "space": ({"free": 3 * GB}, "/runs has 3.0 GB free, and the run needs 10 GB: delete", False),
    "own folder": ({"sees_mark": False}, "/runs is not the folder of rank 0: choose one on a shared file", False),
    "shm": ({"shm": 64 << 20}, "/dev/shm has 64 MiB free, and NCCL and CPU ranks need 1 GiB", False),
    "open files": ({"open_files": 1024}, "a process may open 1,024 files, and 6 ranks need 4,096: ulimit -n", False),
    "failed": ({"failed": "writing to /runs: no answer for 60 s"}, "writing to /runs: no answer for 60 s", True),
}  # fmt: skip


@pytest.mark.parametrize("change,said,stops", ONE.values(), ids=ONE)
def test_one_machine_of_three_is_named(change, said, stops):
    problems = find_problems(cluster({}, change, {}), 6)
    assert problems and said in str(problems[0]), problems
    assert all(p.stops == stops and p.machines == ("b",) and p.where.split()[0] in ("b", "rank") for p in problems)


def test_ranks_of_a_machine_with_several_environments():
    facts = cluster({})
    facts[1] = dataclasses.replace(facts[1], alike=ALIKE | {"torch": "2.13.0"})
    (found,) = find_problems(facts, 2)
    assert "torch 2.13.0, but 2.11.0 on 1 other rank" in str(found) and found.stops


def test_a_machine_without_gpus_is_not_asked_for_them():
    no_gpus = {"gpu_used": None, "num_gpus": 0, "gpu_files": 0, "open_files": 1024, "locked_memory": 0,
               "alike": {"GPUs": "", "InfiniBand ports": ""}}  # fmt: skip
    assert lines(cluster(no_gpus, no_gpus)) == []
    assert device_of(cluster(no_gpus, {}), "auto") == "cpu"
    assert "torch finds no GPU: use --device cpu" in lines(cluster(no_gpus, no_gpus), device="cuda")[0]
    many = find_problems(cluster(no_gpus), 1000)
    assert [problem.what for problem in many] == ["a process may open 1,024 files, and 1,000 ranks need 8,512"]


def test_machines_of_one_name_are_told_apart():
    machines = machines_of([*cluster({"boot": "1"}), dataclasses.replace(GOOD, rank=9, host="a", boot="2")])
    assert [(machine.name, machine.numbers) for machine in machines] == [("a#1", [0, 1]), ("a#2", [9])]


def test_facts_travel_between_versions_of_the_project():
    assert Facts.from_json(dataclasses.asdict(GOOD)) == GOOD
    assert Facts.from_json({"rank": 3, "host": "old", "color": "red"}) == Facts(3, "old")


# ---- links ----


def links(number, ranks=1, slow=lambda _a, _b: 1.0):
    """All links of `number` machines: 340 GB/s within a machine, 46 between machines, times `slow` of the ranks."""
    size = number * ranks
    usual = {True: 340 * GB, False: 46 * GB}
    return [
        LinkSpeed(a, b, slow(a, b) * usual[a // ranks == b // ranks] * (1 + 0.01 * (a * size + b) / size**2))
        for a in range(size)
        for b in range(size)
        if a != b
    ]


def named(number, ranks=1, slow=lambda _a, _b: 1.0):
    machines = machines_of(cluster(*[{}] * number, ranks=ranks))
    return [problem.where for problem in find_link_problems(links(number, ranks, slow), machines)]


def test_equal_links_have_no_problem():
    assert named(4, 2) == named(1, 4) == named(2, 1) == []
    kinds = kinds_of(links(3, 2), machines_of(cluster({}, {}, {})))
    assert [(kind.name, len(kind.links)) for kind in kinds] == [("within a machine", 6), ("between machines", 24)]


SLOW = {
    "one link": (4, 1, lambda a, b: 0.1 if (a, b) == (1, 2) else 1, ["rank 1 on b -> rank 2 on c"]),
    "both directions": (4, 1, lambda a, b: 0.1 if {a, b} == {1, 2} else 1,
                        ["rank 1 on b -> rank 2 on c", "rank 2 on c -> rank 1 on b"]),
    "one of two machines": (2, 1, lambda a, _: 0.1 if a else 1, ["rank 1 on b -> rank 0 on a"]),
    "a machine that sends slowly": (4, 2, lambda a, b: 0.1 if a // 2 == 1 != b // 2 else 1,
                                    ["b -> all other machines"]),
    "a slow machine of three": (3, 2, lambda a, b: 0.1 if 1 in (a // 2, b // 2) and a // 2 != b // 2 else 1,
                                ["b -> all other machines", "all other machines -> b"]),
    "a slow machine with a slower link": (3, 1, lambda a, b: 0.01 if (a, b) == (1, 2) else 0.2 if a == 1 else 1,
                                          ["b -> all other machines", "rank 1 on b -> rank 2 on c"]),
    "a cable between machines": (4, 2, lambda a, b: 0.1 if (a // 2, b // 2) == (1, 2) else 1, ["b -> c"]),
    "a card of one rank": (4, 2, lambda a, b: 0.1 if a == 3 and b // 2 != 1 else 1,
                           ["rank 3 of b -> all ranks"]),
    "a receiving card": (4, 2, lambda a, b: 0.1 if b == 3 and a // 2 != 1 else 1,
                         ["all ranks -> rank 3 of b"]),
    "a GPU within a machine": (2, 4, lambda a, b: 0.1 if a == 5 and b > 3 else 1, ["rank 5 of b -> all ranks"]),
    "all GPUs of a machine": (4, 4, lambda a, b: 0.1 if a // 4 == b // 4 == 2 else 1, ["within c"]),
}  # fmt: skip


@pytest.mark.parametrize("number,ranks,slow,expected", SLOW.values(), ids=SLOW)
def test_what_slow_links_share_is_named_once(number, ranks, slow, expected):
    assert named(number, ranks, slow) == expected


@pytest.mark.parametrize("sizes", [[1], [4], [1, 1, 1], [2, 2], [3, 3, 3], [2, 3, 1], [8, 8, 8, 8]])
def test_each_pair_is_measured_once_within_or_between_machines(sizes):
    """In a round between machines, all ranks of a machine send to one other, so that they share its network card."""
    home = [machine for machine, size in enumerate(sizes) for _ in range(size)]
    rounds = rounds_of([[rank for rank, of in enumerate(home) if of == machine] for machine in range(len(sizes))])
    assert sorted(pair for pairs in rounds for pair in pairs) == [*combinations(range(len(home)), 2)]
    for pairs in rounds:
        assert pairs and len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
        partners = {(home[rank], home[other]) for a, b in pairs for rank, other in ((a, b), (b, a))}
        assert len(partners) == len({machine for machine, _ in partners})
        assert len({a == b for a, b in partners}) == 1


# ---- docs/cluster.md shows what is printed about a cluster like its example ----


def test_the_page_shows_the_report():
    """Four machines with two GPUs each. One cable, one clock and one driver differ."""
    other = {"clock": 0.002, "alike": {"driver": "535.161.08"}}
    made_up = cluster({}, other, {"clock": -0.001}, {"clock": 3600.7})
    facts = [dataclasses.replace(one, host=f"gpu-{one.host}", alike={**one.alike, "CUDA": "12.8"}) for one in made_up]
    measured = links(4, 2, lambda a, b: 0.13 if (a // 2, b // 2) == (2, 0) else 1)
    problems = [*find_problems(facts, 8), *find_link_problems(measured, machines_of(facts))]
    printed = cluster_report(Report(8, "cuda", facts, problems, measured))
    assert f"```\n{printed}\n```" in (ROOT / "docs" / "cluster.md").read_text()
