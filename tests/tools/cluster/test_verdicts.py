"""Machines and links with made-up problems: each is found, named, and has a way out. Equal ones have none."""

import dataclasses

import pytest

from moe_dualpipe.tools.cluster.facts import Disk, Facts, Gpu, machines_of
from moe_dualpipe.tools.cluster.link_verdicts import find_link_problems, kinds_of
from moe_dualpipe.tools.cluster.links import Exchange, LinkSpeed
from moe_dualpipe.tools.cluster.verdicts import device_of, find_problems

GB, GIB = 10**9, 2**30
H200 = Gpu("NVIDIA H200", 140 * GIB, 139 * GIB)
GOOD = Facts(
    versions={"Python": "3.12.3", "torch": "2.11.0", "NCCL": "2.28.9", "driver": "570.86.10"}, num_gpus=2, gpu_files=2,
    gpu=H200, infiniband={"mlx5_0/1": "ACTIVE, 400 Gb/sec"}, address="10.0.0.1", shm=64 * GIB, open_files=65536,
    local_size=2, clock=0.0, sees_mark=True, disk=Disk("/runs", 10**12, 2e9),
    settings={"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_TC": "106"},
)  # fmt: skip


def cluster(*changes, ranks=2):
    """The facts of machines a, b, c ..., each with two ranks and the good facts, but for its changes."""
    return [
        dataclasses.replace(GOOD, host="abcdef"[i], rank=ranks * i + j, local_rank=j, local_size=ranks, **change)
        for i, change in enumerate(changes)
        for j in range(ranks)
    ]


def lines(facts, **needs):
    return [str(problem) for problem in find_problems(facts, len(facts), **needs)]


def test_equal_machines_have_no_problem():
    assert lines(cluster({}, {}, {})) == []
    assert device_of(cluster({}, {}), "auto") == "cuda"


ONE = {
    "version": ({"versions": {**GOOD.versions, "torch": "2.13.0"}}, "torch 2.13.0, but 2.11.0 on 2 other machines"),
    "driver": ({"versions": {**GOOD.versions, "driver": "535.1"}}, "driver 535.1, but 570.86.10 on 2 other"),
    "fewer GPUs": ({"num_gpus": 1, "gpu": None}, "2 processes, but 1 GPU: start at most 1 with --nproc-per-node"),
    "no CUDA": ({"num_gpus": 0, "gpu": None}, "2 GPUs, but torch finds none: it is built without CUDA"),
    "other GPU": ({"gpu": Gpu("NVIDIA A100", 80 * GIB, 80 * GIB)}, "GPUs: 2 x NVIDIA A100, 80 GiB, but 2 x N"),
    "used GPU": ({"gpu": Gpu("NVIDIA H200", 140 * GIB, 100 * GIB)}, "rank 2 on b: 40 of 140 GiB of GPU 0 are in use"),
    "setting": ({"settings": {"NCCL_IB_TC": "0"}}, "NCCL_IB_TC is 0, but 106 on 2 other machines"),
    "InfiniBand": ({"infiniband": {"mlx5_0/1": "DOWN, 400 Gb/sec"}}, "InfiniBand ports: 1 x DOWN, 400 Gb/sec, but"),
    "locked memory": ({"locked_memory": 8 << 20}, "it may lock 8 MiB of memory, and InfiniBand needs more: ulimit -l"),
    "loopback": ({"address": "127.0.1.1"}, "its name resolves to 127.0.1.1, so gloo would listen where other machines"),
    "no address": ({"address": ""}, "its name does not resolve, so gloo"),
    "port": ({"port": 29500, "port_in_use": True}, "b: port 29500 is in use: end the program that ss "),
    "clock": ({"clock": 3600.2}, "its clock is 1.0 h ahead of those of most machines: synchronize"),
    "disk": ({"disk": Disk("/runs", error="/runs: Read-only file system")}, "cannot be written: /runs: Read-only file"),
    "space": ({"disk": Disk("/runs", 3 * GB, 1e9)}, "/runs has 3.0 GB free, and the run needs 10 GB: delete"),
    "slow disk": ({"disk": Disk("/runs", 10**12, 5e6)}, "/runs is written at 5.0 MB/s: choose a faster disk"),
    "own folder": ({"sees_mark": False}, "/runs is not the folder of a: choose one on a shared file system"),
    "shm": ({"shm": 64 << 20}, "/dev/shm has 64 MiB free, and NCCL and CPU ranks need 1 GiB"),
    "open files": ({"open_files": 1024}, "a process may open 1,024 files, and 6 ranks need 4,096: ulimit -n 65536"),
    "failed": ({"failed": "writing to /runs: no answer for 60 s"}, "rank 2 on b: writing to /runs: no answer for 60 s"),
}  # fmt: skip


@pytest.mark.parametrize("change,said", ONE.values(), ids=ONE)
def test_one_machine_of_three_is_named(change, said):
    found = lines(cluster({}, change, {}))
    assert found and said in found[0], found
    assert all(line.startswith(("b (ranks 2, 3): ", "b: ", "rank 2 on b: ", "rank 3 on b: ")) for line in found)


def test_clocks_may_differ_by_what_a_message_may_take():
    assert lines(cluster({}, {"clock": 1.5}, {})) == []


def test_the_machine_whose_clock_is_wrong_may_be_that_of_rank_0():
    found = lines(cluster({}, {"clock": 3600.0}, {"clock": 3600.0}))
    assert [line.partition(", ")[0] for line in found] == ["a (ranks 0"] and "1.0 h behind" in found[0]


def test_of_two_clocks_the_difference_is_told():
    (found,) = lines(cluster({}, {"clock": -90.0}))
    assert found.startswith("b (ranks 2, 3): its clock is 1.5 min behind that of a: ")


def test_ranks_of_a_machine_with_several_environments():
    facts = cluster({})
    facts[1] = dataclasses.replace(facts[1], versions={**GOOD.versions, "torch": "2.13.0"})
    (found,) = find_problems(facts, 2)
    assert "torch differs between its ranks: 2.11.0, 2.13.0" in str(found) and found.stops


def test_a_machine_without_gpus_is_not_asked_for_them():
    plain = {"gpu": None, "num_gpus": 0, "gpu_files": 0, "infiniband": {}, "open_files": 1024, "locked_memory": 0}
    assert lines(cluster(plain, plain)) == []
    assert device_of(cluster(plain, {}), "auto") == "cpu"
    assert all("torch finds no GPU: use --device cpu" in line for line in lines(cluster(plain, plain), device="cuda"))
    many = find_problems(cluster(plain), 1000)
    assert [problem.what for problem in many] == ["a process may open 1,024 files, and 1,000 ranks need 8,512"]


def test_machines_of_one_name_are_told_apart():
    machines = machines_of([*cluster({"boot": "1"}), dataclasses.replace(GOOD, rank=9, host="a", boot="2")])
    assert [(machine.name, machine.numbers) for machine in machines] == [("a#1", [0, 1]), ("a#2", [9])]


def test_facts_travel_between_versions_of_the_project():
    assert Facts.from_json(GOOD.to_json()) == GOOD
    newer = GOOD.to_json() | {"color": "red", "gpu": {"name": "X", "cores": 7}}
    assert Facts.from_json(newer).gpu == Gpu("X")
    assert Facts.from_json({"rank": 3, "host": "old"}) == Facts(3, "old")


# ---- Links ----


def links(number, ranks=1, slow=lambda _a, _b: 1.0):
    """All links of `number` machines: 100 GB/s within a machine, 10 between machines, times `slow` of the ranks."""
    size = number * ranks
    return [
        LinkSpeed(
            a, b, slow(a, b) * GB * (100 if a // ranks == b // ranks else 10) * (1 + 0.01 * (a * size + b) / size**2)
        )
        for a in range(size)
        for b in range(size)
        if a != b
    ]


def named(number, ranks=1, slow=lambda _a, _b: 1.0, exchanges=()):
    machines = machines_of(cluster(*[{}] * number, ranks=ranks))
    return [problem.where for problem in find_link_problems(links(number, ranks, slow), exchanges, machines)]


def test_equal_links_have_no_problem():
    assert named(4, 2) == [] and named(1, 4) == [] and named(2, 1) == []


SLOW = {
    "one link": (4, 1, lambda a, b: 0.1 if (a, b) == (1, 2) else 1, ["rank 1 on b -> rank 2 on c"]),
    "both directions": (4, 1, lambda a, b: 0.1 if {a, b} == {1, 2} else 1,
                        ["rank 1 on b -> rank 2 on c", "rank 2 on c -> rank 1 on b"]),
    "one of two machines": (2, 1, lambda a, _: 0.1 if a else 1, ["rank 1 on b -> rank 0 on a"]),
    "asymmetric": (4, 1, lambda a, b: 0.6 if (a, b) == (1, 2) else 1, ["rank 1 on b -> rank 2 on c"]),
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


def test_a_slow_link_is_described_with_numbers():
    machines = machines_of(cluster({}, {}, {}, ranks=1))
    (found,) = find_link_problems(links(3, 1, lambda a, b: 0.1 if (a, b) == (1, 2) else 1), [], machines)
    way_out = "check the cable, the switch port and the network card"
    assert str(found) == f"rank 1 on b -> rank 2 on c: 1.01 GB/s, and 10 GB/s is usual between machines: {way_out}"


def test_processes_on_cpus_share_the_memory_of_both_directions():
    cpus = machines_of(cluster({"gpu": None}, ranks=4))
    gpus = machines_of(cluster({}, ranks=4))
    measured = links(1, 4, lambda a, b: 0.6 if (a, b) == (1, 2) else 1)
    assert find_link_problems(measured, [], cpus) == []
    assert [problem.where for problem in find_link_problems(measured, [], gpus)] == ["rank 1 -> rank 2 on a"]


def test_expert_groups_are_compared_with_those_of_their_kind():
    pairs = [Exchange((2 * i, 2 * i + 1), 50e9) for i in range(4)]  # within machines of four ranks
    assert named(2, 4, exchanges=pairs) == []
    pairs[2] = Exchange((4, 5), 20e9)
    assert named(2, 4, exchanges=pairs) == ["expert group of ranks 4-5"]
    both = [Exchange((0, 1, 2, 3), 50e9), Exchange((4, 5, 6, 7, 8, 9, 10, 11), 5e9)]
    assert named(3, 4, exchanges=both) == []


def test_sockets_on_machines_with_infiniband_are_named():
    machines = machines_of(cluster({}, {"infiniband": {}}, {}, ranks=1))
    (found,) = find_link_problems(links(3), [], machines, sockets=[0, 1])
    said = "a: NCCL uses TCP sockets, but this machine has InfiniBand: unset NCCL_IB_DISABLE"
    assert str(found).startswith(said)


def test_kinds():
    kinds = kinds_of(links(3, 2), machines_of(cluster({}, {}, {})))
    assert [(kind.name, len(kind.links)) for kind in kinds] == [("within a machine", 6), ("between machines", 24)]
