"""docs/cluster.md shows what is printed about a cluster like its example."""

import dataclasses
from pathlib import Path

from moe_dualpipe.tools.cluster import Facts, LinkSpeed, Report, find_problems
from moe_dualpipe.tools.cluster.facts import machines_of
from moe_dualpipe.tools.cluster.verdicts import cluster_report, find_link_problems

PAGE = Path(__file__).parents[3] / "docs" / "cluster.md"
ALIKE = {
    "Python": "3.12.3",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "CUDA": "12.8",
    "NCCL": "2.28.9",
    "driver": "570.86.10",
    "GPUs": "2 x NVIDIA H200, 141 GiB",
    "InfiniBand ports": "2 x ACTIVE, 400 Gb/sec (4X NDR)",
}


def example():
    """Four machines with two GPUs each. One cable, one clock and one driver differ."""
    good = Facts(
        local_size=2, alike=ALIKE, num_gpus=2, gpu_files=2, gpu_used=0.01, shm=64 * 10**9, open_files=1048576,
        folder="/data/runs", free=9 * 10**12, sees_mark=True, address="10.0.0.1",
    )  # fmt: skip
    changes = [
        {"clock": 0.0},
        {"clock": 0.002, "alike": ALIKE | {"driver": "535.161.08"}},
        {"clock": -0.001},
        {"clock": 3600.7},
    ]
    facts = [
        dataclasses.replace(good, rank=2 * i + j, local_rank=j, host=f"gpu-{'abcd'[i]}", **change)
        for i, change in enumerate(changes)
        for j in range(2)
    ]
    links = [
        LinkSpeed(a, b, (1 + 0.01 * ((3 * a + b) % 5)) * speed(a // 2, b // 2))
        for a in range(8)
        for b in range(8)
        if a != b
    ]
    problems = [*find_problems(facts, 8), *find_link_problems(links, machines_of(facts))]
    return Report(8, "cuda", facts, problems, links)


def speed(source, to):
    return 340e9 if source == to else 6.1e9 if (source, to) == (2, 0) else 46e9


def test_the_page_shows_the_report():
    assert f"```\n{cluster_report(example())}\n```" in PAGE.read_text()
