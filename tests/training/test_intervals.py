"""--eval-every and --log-every: what is recorded when, and that training does not change."""

import contextlib
import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.training.console import Console
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.metrics import merged
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, losses, make_trainer, records, settings
from tests.support.special_experts import DropoutExperts, named

WITH_DROPOUT = dataclasses.replace(MODEL, num_layers=2, experts=named(DropoutExperts))
SMALL = {"seq_len": 16, "eval_sequences": 4, "model": WITH_DROPOUT}


def test_an_interval_has_sums_rates_the_latest_values_and_means_of_finite_values():
    steps = [
        {"step": 4, "loss": 3.0, "seconds": 1.0, "tokens": 8, "tokens_per_s": 8.0, "lr": 0.1, "dead_experts": 0.5},
        {"step": 5, "loss": math.nan, "seconds": 1.0, "tokens": 8, "tokens_per_s": 8.0, "lr": 0.2, "dead_experts": 0.0},
        {"step": 6, "loss": 1.0, "seconds": 2.0, "tokens": 8, "tokens_per_s": 4.0, "lr": 0.3, "dead_experts": 0.25},
    ]
    assert merged(steps) == {
        "step": 6, "loss": 2.0, "seconds": 4.0, "tokens": 24, "tokens_per_s": 6.0, "lr": 0.3, "dead_experts": 0.25,
    }  # fmt: skip
    assert merged(steps[:1]) is steps[0]
    assert math.isnan(merged([steps[1]] * 2)["loss"])


def test_records_end_at_multiples_of_log_every_and_at_the_end(tmp_path):
    config = settings(tmp_path, log_every=3, steps=7)
    run: Any = SimpleNamespace(config=config, layout=Layout(), folder=tmp_path, first_step=0)
    with contextlib.closing(Console(run, verbose=False)) as console:
        for step in range(1, 8):
            console.step({"step": step, "loss": float(step), "tokens": 5, "tokens_per_s": 1.0, "seconds": 5.0})
    assert losses(records(tmp_path)) == {3: 2.0, 6: 5.0, 7: 7.0}
    assert losses(records(tmp_path), "tokens") == {3: 15, 6: 15, 7: 5}


def train_all(rank, configs):
    """Train each. Returns the last state of each run, compared on this rank to that of the first."""
    states = []
    for config in configs:
        trainer = make_trainer(rank, config)
        train_loop(trainer)
        states.append({name: tensor.clone() for name, tensor in trainer.state().items()})
    return [all(torch.equal(state[name], states[0][name]) for name in states[0]) for state in states]


@pytest.mark.long
def test_validations_and_intervals_change_no_result(tmp_path):
    """With dropout, and with biases that follow the loads of the experts."""
    every_step = settings(tmp_path / "plain", **SMALL)
    variants = {
        "evaluated": {"eval_every": 2, "save_every": 3},
        "logged": {"eval_every": 5, "log_every": 4, "save_every": 3},
        "profiled": {"eval_every": 1, "profile": 2},
        "resumed": {"eval_every": 2, "log_every": 4, "resume": str(tmp_path / "logged/checkpoints/step-000003")},
    }
    configs = [every_step] + [change(every_step, out=str(tmp_path / k), **v) for k, v in variants.items()]
    assert run_ranks(2, train_all, configs) == [[True] * 5] * 2

    plain, evaluated, logged, profiled, resumed = (records(config.checkpoint.out) for config in configs)
    assert [*losses(plain, "validation_loss")] == [0, 6]
    assert [*losses(evaluated, "validation_loss")] == [0, 2, 4, 6]
    assert losses(evaluated) == losses(plain)
    assert losses(evaluated, "validation_loss")[6] == losses(plain, "validation_loss")[6]
    assert [record["step"] for record in evaluated] == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6]
    assert [*losses(profiled, "validation_loss")] == [0, 1, 2, 4, 5, 6]  # steps 3 and 4 are in the recording

    # At the checkpoint of step 3, every 4 steps, at the validation of step 5, and at the end.
    of_steps = losses(plain)
    assert losses(logged) == pytest.approx(
        {3: (of_steps[1] + of_steps[2] + of_steps[3]) / 3, **{step: of_steps[step] for step in (4, 5, 6)}}
    )
    assert sum(losses(logged, "tokens").values()) == sum(losses(plain, "tokens").values())
    assert losses(resumed) == pytest.approx({4: of_steps[4], 6: (of_steps[5] + of_steps[6]) / 2})
    assert [*losses(resumed, "validation_loss")] == [3, 4, 6]
    assert losses(resumed, "validation_loss")[6] == losses(plain, "validation_loss")[6]
