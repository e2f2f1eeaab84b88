"""The benchmark of expert parallelism measures every case, relative to ep 1 of the same round."""

import dataclasses

from benchmarks.expert_parallel import CASES, Options, measure, report
from moe_dualpipe.models import preset
from tests.support.ranks import run_ranks


def steps(rank):
    model = dataclasses.replace(preset("tiny"), router="balanced", num_layers=2)
    return measure(model, rank, Options(rounds=2, micro_batches=2, sequences=1, seq_len=16))


def test_every_case_is_measured_on_both_ranks():
    first, second = run_ranks(2, steps)
    assert first == second  # the longest step and the CPU time of both ranks
    assert {name: len(found) for name, found in first.items()} == dict.fromkeys(CASES, 2)
    assert all(seconds > 0 and cpu > 0 for found in first.values() for seconds, cpu in found)


def test_speed_is_relative_to_ep_1_of_the_same_round():
    names = list(CASES)
    text = report({names[0]: [(1.0, 1.5), (2.0, 3.5)], names[1]: [(2.0, 3.0), (4.0, 7.0)], names[2]: [(2.0, 2.0)] * 2})
    assert f"| {names[1]} | 3.000 | 0.500 | 0.500 to 0.500 | 5.000 |" in text
    assert f"| {names[2]} | 2.000 | 0.750 | " in text
