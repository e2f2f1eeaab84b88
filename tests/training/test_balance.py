"""Expert load balancing in runs: equal biases on all ranks, resumed biases, and recorded auxiliary losses."""

import dataclasses
import math

import torch

from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, make_trainer, settings, skip_steps

BALANCED = dataclasses.replace(MODEL, num_layers=3, router_bias=True, sequence_loss=0.02, z_loss=0.003)
OFTEN = {"model": BALANCED, "bias_rate": 0.01, "steps": 4, "seq_len": 16, "eval_sequences": 1}


def biased_steps(rank, config):
    """Do three steps and check the biases against the loads of all ranks. Returns biases and records."""
    trainer = make_trainer(rank, config)
    load, loads = trainer.balance.loads, []
    trainer.balance.loads = lambda device: loads.append(load(device)) or loads[-1]  # type: ignore[method-assign]
    records = [trainer.step(step).record for step in range(2)]
    tokens = config.batch.batch_size * config.batch.seq_len
    biases = biases_of(trainer)
    assert biases
    for name, bias in biases.items():
        expected = torch.zeros(MODEL.num_experts)
        for load_LE in loads:
            load = load_LE[int(name.split(".")[1]) - MODEL.num_dense_layers].tolist()
            assert sum(load) == tokens * MODEL.experts_per_token
            mean = sum(load) / len(load)
            expected += torch.tensor([config.bias_rate * ((mean > n) - (mean < n)) for n in load])
        assert torch.equal(bias, expected)
        assert torch.equal(trainer.state()[f"model.{name}"], bias)
    values = {name: bias.tolist() for name, bias in biases.items()}
    skip_steps(trainer)
    trainer.balance.loads = lambda _: loads[-1]  # type: ignore[method-assign]
    trainer.step(2)
    assert {name: bias.tolist() for name, bias in biases.items()} == values  # a skipped step moves none
    trainer.check_replicas()
    return values, records


def biased_steps_each(rank, configs):
    return [biased_steps(rank, config) for config in configs]


def biases_of(trainer):
    return {name.removeprefix("model."): t for name, t in trainer.buffers.state().items() if name.endswith("bias_E")}


def test_biases_follow_the_loads_of_all_ranks_in_every_layout(tmp_path):
    divisions = [{"schedule": "1f1b", "recompute": "full"}, {"ep": 2}]
    configs = [settings(tmp_path / str(i), **{**OFTEN, **changes}) for i, changes in enumerate(divisions)]
    ranks = run_ranks(2, biased_steps_each, configs)
    for parts in zip(*ranks, strict=True):
        everywhere = {name for biases, _ in parts for name in biases}
        assert everywhere == {f"layers.{layer}.mlp.router.bias_E" for layer in (1, 2)}
        for name in everywhere:
            copies = [biases[name] for biases, _ in parts if name in biases]
            assert all(copy == copies[0] for copy in copies)
    for _, steps in ranks[0]:
        for step in steps:
            assert 1 <= step["sequence_loss"] < MODEL.num_experts / MODEL.experts_per_token
            assert 0.5 < step["z_loss"] / math.log(MODEL.num_experts) ** 2 < 2
