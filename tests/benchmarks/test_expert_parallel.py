"""The benchmark of expert parallelism measures every case."""

import dataclasses

import pytest

from benchmarks.expert_parallel import CASES, Options, measure
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
