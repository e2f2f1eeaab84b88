"""The benchmark of expert parallelism measures every case."""

import dataclasses

import pytest
import torch

from benchmarks.expert_parallel import CASES, Options, latency_report, measure, measure_latency, transfer_blocks
from moe_dualpipe.models import preset
from tests.support.ranks import run_ranks


def steps(rank):
    model = dataclasses.replace(preset("tiny"), router="balanced", num_layers=2)
    return measure(model, rank, Options(rounds=2, micro_batches=2, sequences=1, seq_len=16))


@pytest.mark.long
def test_every_case_is_measured_on_both_ranks():
    first, second = run_ranks(2, steps)
    assert first == second  # the longest step and the CPU time of both ranks
    assert {name: len(found) for name, found in first.items()} == dict.fromkeys(CASES, 2)
    assert all(seconds > 0 and cpu > 0 for found in first.values() for seconds, cpu in found)


def latencies(rank):
    return measure_latency(3, rank, torch.device("cpu"), Options(hidden_size=16, exchanges=4))


def test_the_latency_of_the_slowest_rank_is_measured_for_each_backend():
    first, second = run_ranks(2, latencies)
    assert first == second and list(first) == ["all_to_all", "shared"]
    assert all(len(seconds) == 4 and min(seconds) > 0 and blocks == 0 for seconds, blocks in first.values())
    twice = {"all_to_all": ([1e-6, 3e-6], 0.0), "symmetric": ([2e-6, 6e-6], 5e-6)}
    assert latency_report(twice).splitlines()[2:] == [
        "| all_to_all | 2 | 2 to 2 | 1.00 | 1.00 to 1.00 | - |", "| symmetric | 4 | 3 to 5 | 2.00 | 2.00 to 2.00 | 5 |",
    ]  # fmt: skip


def test_multiprocessors_are_counted_for_kernels_that_transfer():
    def kernel(name, *grid):
        return {"cat": "kernel", "name": name, "dur": 3.0, "args": {"grid": list(grid)}}

    copy = {"cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "dur": 7.0, "args": {}}
    trace = [kernel("push_kernel", 20, 1, 1), kernel("ncclDevKernel_SendRecv(int)", 4, 2, 1), kernel("gemm", 99, 1, 1)]
    assert transfer_blocks([{"ph": "M"}, copy, *trace]) == pytest.approx((20 + 8) * 3e-6)
