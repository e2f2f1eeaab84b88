"""A flipped bit in a replica's weight is reported before the update, whether or not the update would overwrite it."""

import dataclasses

import pytest
import torch

from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, make_trainer, settings

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
