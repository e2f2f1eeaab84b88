"""Dropout is on in training steps, and off in validation and samples (in resumed runs: test_buffers.py)."""

import dataclasses

import torch

from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, make_trainer, settings
from tests.support.special_experts import DropoutExperts, named

DROPOUT = dataclasses.replace(SHALLOW, experts=named(DropoutExperts))
SMALL = {"seq_len": 16, "eval_sequences": 1}


def modes(stages):
    return [module.training for stage in stages for module in stage.modules()]


def validate_and_sample(rank, config):
    trainer = make_trainer(rank, config)
    stages = [*trainer.stages.values()]
    stages[0].get_submodule("layers.0.attention").eval()  # modes of the user stay
    before = modes(stages)
    assert not all(before)
    assert trainer.validation_loss() == trainer.validation_loss()
    assert modes(stages) == before
    assert trainer.sample() == trainer.sample()
    assert modes(stages) == before

    random = torch.random.get_rng_state()
    trainer.step(0)
    assert not torch.equal(torch.random.get_rng_state(), random), "a training step has dropout"
    seeds = [(trainer.training_losses(step), torch.initial_seed())[1] for step in (0, 1, 0)]
    assert seeds[0] == seeds[2] != seeds[1], "each step draws dropout of its own, and the same when it is repeated"


def test_validation_and_samples_have_no_dropout_and_restore_the_modes(tmp_path):
    run_ranks(1, validate_and_sample, settings(tmp_path, model=DROPOUT, **SMALL, sample_tokens=8))
