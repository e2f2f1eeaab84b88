"""A flipped bit in a replica's weight is reported before the update, whether or not the update would overwrite it."""

import dataclasses
import re

import pytest
import torch

from moe_dualpipe.training.loop import train_loop
from tests.support.checkpoints import checkpoint_names
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, make_trainer, settings
from tests.support.special_experts import LowRankExperts, named

SMALL = {"seq_len": 8, "eval_sequences": 2}
BALANCED = dataclasses.replace(SHALLOW, router_bias=True)
DENSE, EXPERT, BIAS = "layers.0.attention.qkv.weight", "layers.1.mlp.experts.gate_up", "layers.1.mlp.router.bias_E"


def flip_lowest_bit(tensor):
    element = tensor.detach().view(-1)[-1:].view(torch.uint8)
    element[0] ^= 1  # little-endian


def replicated(trainer):
    """The tensors of this rank that have replicas, by global name."""
    sets = (*trainer.replicas, *trainer.buffers.sets())
    return {name: tensor for one in sets if one.group for name, tensor in one.parameters.items()}


def reports(rank, config, names):
    """Flip a bit of each tensor on each rank in turn. Returns the error of the next step, by name and rank."""
    trainer = make_trainer(rank, config)
    trainer.step(0)
    seen = {}
    for name in names:
        for flipped in range(torch.distributed.get_world_size()):
            before = [tensor.clone() for tensor in trainer.state().values()]
            if rank == flipped:
                flip_lowest_bit(replicated(trainer)[name])
            with pytest.raises(RuntimeError) as error:
                trainer.step(1)
            if rank == flipped:
                flip_lowest_bit(replicated(trainer)[name])
            seen[name, flipped] = str(error.value)
            trainer.optimizer.drop_gradients()
            assert all(torch.equal(a, b) for a, b in zip(before, trainer.state().values(), strict=True))
    trainer.step(1)
    return seen


@pytest.mark.parametrize("changes", [
    {"pp": 1}, {"pp": 1, "dtype": "bfloat16"}, {"pp": 2}, {"pp": 2, "zero": False},
], ids=str)  # fmt: skip
@pytest.mark.quick("{'pp': 1, 'dtype': 'bfloat16'}", "{'pp': 2}")
def test_a_flip_on_owner_or_other_rank_of_dense_expert_and_bias_stops_the_next_step_before_its_update(
    tmp_path, changes
):
    """pp 1: data-parallel replicas; pp 2: those of DualPipe on mirrored ranks."""
    names = [DENSE, EXPERT, BIAS]
    both = run_ranks(2, reports, settings(tmp_path, **SMALL, model=BALANCED, **changes), names)
    assert both[0] == both[1]
    assert both[0] == {
        (name, rank): f"ranks 0, 1 disagree in {name}: replicas must stay bit-equal"
        for name in names
        for rank in (0, 1)
    }


def report_of_three(rank, config):
    trainer = make_trainer(rank, config)
    if rank == 1:
        flip_lowest_bit(replicated(trainer)[DENSE])
    with pytest.raises(RuntimeError) as error:
        trainer.step(0)
    return str(error.value)


def test_of_three_replicas_the_one_with_the_flip_is_named(tmp_path):
    message = f"rank 1 deviates from ranks 0, 2 in {DENSE}: replicas must stay bit-equal"
    assert run_ranks(3, report_of_three, settings(tmp_path, **SMALL, pp=1, batch_size=6)) == [message] * 3


def undetected(rank, config, flips):
    """Do a step after each flip, (name in `Trainer.state`, rank), without an error. Returns what is flipped."""
    trainer, flipped = make_trainer(rank, config), []
    trainer.step(0)
    for step, (name, of_rank) in enumerate(flips, 1):
        if rank == of_rank and name in trainer.state():
            flip_lowest_bit(trainer.state()[name])
            flipped.append(name)
        trainer.step(step)
    trainer.check_replicas()
    return flipped


@pytest.mark.long
def test_state_that_only_one_rank_has_is_not_compared(tmp_path):
    """With ZeRO: moments, and master weights of a bf16 model. With --ep: experts without replicas."""
    names = [f"{kind}.{DENSE}" for kind in ("model", "exp_avg", "exp_avg_sq")]
    flips = [(name, rank) for name in names for rank in (0, 1)]
    both = run_ranks(2, undetected, settings(tmp_path / "zero", **SMALL, pp=1, dtype="bfloat16"), flips)
    assert sorted(both[0] + both[1]) == sorted(names)
    alone = [(f"model.{EXPERT}.0", 0)]
    assert run_ranks(2, undetected, settings(tmp_path / "ep", **SMALL, pp=1, ep=2), alone) == [[alone[0][0]], []]


def flipped_moment(rank, config):
    trainer = make_trainer(rank, config)
    trainer.step(0)
    if rank:
        trainer.state()[f"exp_avg.{DENSE}"] += 1e-3
    trainer.step(1)
    with pytest.raises(RuntimeError) as error:
        trainer.step(2)
    return str(error.value)


def test_without_zero_another_moment_is_found_by_its_effect_on_the_weights(tmp_path):
    config = settings(tmp_path, **SMALL, pp=1, zero=False)
    assert run_ranks(2, flipped_moment, config) == [f"ranks 0, 1 disagree in {DENSE}: replicas must stay bit-equal"] * 2


def flip_before_a_save(rank, config):
    trainer = make_trainer(rank, config)
    train_step = trainer.step

    def step_and_flip(step):
        record = train_step(step)
        trainer.optimizer.wait()
        if rank and step == 3:
            flip_lowest_bit(replicated(trainer)[DENSE])
        return record

    trainer.step = step_and_flip
    with pytest.raises(RuntimeError, match=re.escape(f"disagree in {DENSE}")):
        train_loop(trainer)
    return checkpoint_names(config.checkpoint.out)


@pytest.mark.long
def test_no_checkpoint_is_saved_of_replicas_that_differ(tmp_path):
    config = settings(tmp_path, **SMALL, pp=1, save_every=2, check_replicas_every=None)
    assert run_ranks(2, flip_before_a_save, config) == [["step-000002"]] * 2


def seen_in_third_step(rank, config, frozen):
    """Flip a bit of a frozen or of a trained weight after the first step. Returns the error of the third, if any."""
    trainer = make_trainer(rank, config)
    trainer.step(0)
    parameters = {name: p for name, p in replicated(trainer).items() if p.requires_grad != frozen}
    owned = trainer.optimizer.owned
    name = next(name for name in parameters if frozen or (name == DENSE))
    if rank == 1 if frozen else name not in owned:
        flip_lowest_bit(parameters[name])
    trainer.step(1)
    try:
        trainer.step(2)
    except RuntimeError as error:
        return name, str(error)
    return name, None


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.long
def test_between_checks_zero_overwrites_a_flip_of_a_trained_weight_but_not_of_a_frozen_one(tmp_path, frozen):
    model = dataclasses.replace(SHALLOW, experts=named(LowRankExperts))
    config = settings(tmp_path, **SMALL, pp=1, model=model, check_replicas_every=3)
    (name, first), (_, second) = run_ranks(2, seen_in_third_step, config, frozen)
    assert first == second
    assert first == (f"ranks 0, 1 disagree in {name}: replicas must stay bit-equal" if frozen else None)
