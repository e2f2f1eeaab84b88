"""The learning rate of every step, and its options."""

import dataclasses
import itertools
import math

import pytest

from moe_dualpipe.runtime.learning_rate import learning_rate
from moe_dualpipe.training.config import OptimizerConfig

OPTIM = OptimizerConfig(lr=0.1, warmup_steps=4, final_lr=0.2, weight_decay=0.5)
WSD = dataclasses.replace(OPTIM, schedule="wsd", decay_steps=9)


def test_cosine_warms_up_and_decays_to_final_lr():
    rates = [learning_rate(OPTIM, step, 14) for step in range(14)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.02)
    assert rates[9] == pytest.approx(0.1 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 5 / 9))))
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(OPTIM, 0, 1) == pytest.approx(0.025)


def test_wsd_is_constant_and_then_decays_as_1_minus_sqrt():
    rates = [learning_rate(WSD, step, 30) for step in range(30)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[3:21] == [0.1] * 18
    assert rates[21:] == pytest.approx([0.1 * (0.2 + 0.8 * (1 - math.sqrt(i / 9))) for i in range(1, 10)])
    by_default = dataclasses.replace(WSD, decay_steps=None)
    assert [step for step in range(4, 31) if learning_rate(by_default, step, 31) < 0.1] == [*range(24, 31)]


def test_wsd_runs_of_any_length_are_equal_before_the_decay():
    for total in (13, 30, 1000):
        before = [learning_rate(WSD, step, total) for step in range(total - 9)]
        assert before == [learning_rate(WSD, step, 5000) for step in range(total - 9)]
        assert learning_rate(WSD, total - 9, total) < 0.1 == learning_rate(WSD, total - 9, 5000)
