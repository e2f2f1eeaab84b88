"""The learning rate of every step, and its options."""

import dataclasses
import itertools
import math

import pytest

from moe_dualpipe.runtime.learning_rate import learning_rate
from moe_dualpipe.training.config import OptimizerConfig
from moe_dualpipe.training.options import parse_arguments
from tests.support.runs import make_run, options

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
    assert rates[-1] == pytest.approx(0.02)


def test_wsd_runs_of_any_length_are_equal_before_the_decay():
    for total in (13, 30, 1000):
        before = [learning_rate(WSD, step, total) for step in range(total - 9)]
        assert before == [learning_rate(WSD, step, 5000) for step in range(total - 9)]
        assert learning_rate(WSD, total - 9, total) < 0.1 == learning_rate(WSD, total - 9, 5000)


def test_wsd_decays_over_a_fifth_of_the_run_by_default():
    by_default = dataclasses.replace(WSD, decay_steps=None)
    rates = [learning_rate(by_default, step, 31) for step in range(31)]
    assert [step for step in range(4, 31) if rates[step] < 0.1] == [*range(24, 31)]


@pytest.mark.parametrize("arguments,message", [
    (["--set", "optim.decay_steps=5"], "optim.decay_steps 5 is for --lr-schedule wsd: cosine decays in all steps"),
    (["--lr-schedule", "wsd", "--steps", "24"],
     "20 warm-up and 5 decay steps do not fit into --steps 24: use fewer --warmup-steps or"),
    (["--lr-schedule", "wsd", "--set", "optim.decay_steps=301"], "20 warm-up and 301 decay steps do not fit"),
    (["--lr-schedule", "wsd", "--set", "optim.decay_steps=-1"], "optim.decay_steps must be at least 1: got -1"),
    (["--set", "optim.momentum=1"], "optim.momentum must be at most 0.999999: got 1.0"),
], ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "")  # fmt: skip
def test_invalid_learning_rate_options(arguments, message):
    with pytest.raises(ValueError) as error:
        make_run(["--device", "cpu", *arguments])
    assert str(error.value).startswith(message)


def test_optimizer_names_and_schedules_are_checked():
    for field, option in (("name", "--optimizer"), ("schedule", "--lr-schedule")):
        optim = dataclasses.replace(OPTIM, **{field: "sgd"})
        with pytest.raises(
            ValueError, match=rf"^unknown {option} 'sgd'; (did you mean 'wsd'\? C|c)hoose from: \w+, \w+$"
        ):
            make_run(options(device="cpu", optim=optim))
    make_run(["--device", "cpu", "--lr-schedule", "wsd", "--steps", "25"])
    make_run(["--device", "cpu", "--lr-schedule", "wsd", "--set", "optim.decay_steps=300"])
    assert parse_arguments([]).parallel.zero
    assert not parse_arguments(["--set", "parallel.zero=false"]).parallel.zero
