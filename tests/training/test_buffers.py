"""Buffers of a custom layer, averaged on request; dropout is on in training, off in validation and samples."""

import dataclasses

import torch
import torch.distributed as dist

from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, make_trainer, settings, skip_steps
from tests.support.special_experts import CountingExperts, DropoutExperts, RunningExperts, named

RUNNING = dataclasses.replace(SHALLOW, experts=named(RunningExperts))
COUNTING = dataclasses.replace(SHALLOW, experts=named(CountingExperts))
SMALL = {"model": RUNNING, "seq_len": 16, "eval_sequences": 1, "steps": 2}
MEANS = {f"layers.1.mlp.experts.mean.{expert}" for expert in range(SHALLOW.num_experts)}


def buffers_of(trainer):
    return {name: t.clone() for name, t in trainer.buffers.state().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())


# ---- Replicas ----


def averaged_steps(rank, config):
    """Compare averages with the buffers of all ranks; validate, and skip a step."""
    trainer = make_trainer(rank, config)
    group = trainer.groups.expert_replicas
    average = trainer.buffers.average
    compared = []

    def checked_average():
        before = buffers_of(trainer)
        average()
        after = buffers_of(trainer)
        for name in sorted(name for name in before if ".mean" in name):
            copies = [torch.empty_like(before[name]) for _ in range(dist.get_world_size(group))]
            dist.all_gather(copies, before[name], group=group)
            compared.append(not torch.equal(*copies))
            assert torch.equal(after[name], (copies[0] + copies[1]) / 2), name

    trainer.buffers.average = checked_average  # type: ignore[method-assign]
    for step in range(2):
        trainer.step(step)
        trainer.check_replicas()
    assert any(compared)

    before = buffers_of(trainer)
    trainer.validation_loss()
    assert same(buffers_of(trainer), before)

    with skip_steps(trainer):
        trainer.step(2)
    skipped = {name: t for name, t in buffers_of(trainer).items() if ".count" not in name}
    assert skipped
    assert all(torch.equal(t, before[name]) for name, t in skipped.items())
    trainer.step(3)
    assert not same(buffers_of(trainer), before)
    return [name for name in before if "router" not in name]


def test_named_buffers_are_averaged_after_each_step(tmp_path):
    seen = run_ranks(2, averaged_steps, settings(tmp_path, **{**SMALL, "model": COUNTING}))
    assert {*seen[0]} == {*seen[1]} == {f"model.{name}" for name in (*MEANS, "layers.1.mlp.experts.count")}


DROPOUT = dataclasses.replace(SHALLOW, experts=named(DropoutExperts))


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
    run_ranks(1, validate_and_sample, settings(tmp_path, model=DROPOUT, seq_len=16, eval_sequences=1, sample_tokens=8))
