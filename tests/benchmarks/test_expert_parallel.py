"""The benchmark of expert parallelism measures every case."""

import dataclasses

import pytest
import torch

from benchmarks.expert_parallel import CASES, Options, latency_report, measure, measure_latency
from moe_dualpipe.models import preset
from tests.support.ranks import run_ranks


def steps(rank):
    model = dataclasses.replace(preset("tiny"), router="balanced", num_layers=2)
    return measure(model, rank, Options(rounds=2, micro_batches=2, sequences=1, seq_len=16))


@pytest.mark.long
def test_every_case_is_measured_on_both_ranks():
    first, second = run_ranks(2, steps)
    assert first == second  # the longest step of both ranks
    assert {name: len(found) for name, found in first.items()} == dict.fromkeys(CASES, 2)
    assert all(seconds > 0 for found in first.values() for seconds in found)


def latencies(rank):
    return measure_latency(3, rank, torch.device("cpu"), Options(hidden_size=16, exchanges=4))


def test_the_latency_of_the_slowest_rank_is_measured_for_each_backend():
    first, second = run_ranks(2, latencies)
    assert first == second and list(first) == ["all_to_all", "shared"]
    assert all(len(seconds) == 4 and min(seconds) > 0 for seconds in first.values())
    twice = {"all_to_all": [1e-6, 3e-6], "symmetric": [2e-6, 6e-6]}
    assert latency_report(twice).splitlines()[2:] == [
        "| all_to_all | 2 | 2 to 2 | 1.00 | 1.00 to 1.00 |", "| symmetric | 4 | 3 to 5 | 2.00 | 2.00 to 2.00 |",
    ]  # fmt: skip
