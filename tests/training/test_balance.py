"""Expert load balancing in runs: equal biases on all ranks, resumed biases, and recorded auxiliary losses."""

import dataclasses
import math
import re

import pytest
import torch

from moe_dualpipe.models.router import Router
from moe_dualpipe.training.options import parse_arguments
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, losses, make_run, make_trainer, settings, skip_steps, train_each, without_clocks

BALANCED = dataclasses.replace(MODEL, num_layers=3, router_bias=True, sequence_loss=0.02, z_loss=0.003)
OFTEN = {"model": BALANCED, "bias_rate": 0.01, "steps": 4, "seq_len": 16, "eval_sequences": 1}


def biased_steps(rank, config):
    """Do three steps and check the biases against the loads of all ranks. Returns biases and records."""
    trainer = make_trainer(rank, config)
    load, loads = trainer.balance.loads, []
    trainer.balance.loads = lambda device: loads.append(load(device)) or loads[-1]  # type: ignore[method-assign]
    records = [trainer.step(step).record for step in range(3)]
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
    trainer.step(3)
    assert {name: bias.tolist() for name, bias in biases.items()} == values  # a skipped step moves none
    check_that_a_difference_is_found(rank, trainer, biases)
    return values, records


def biases_of(trainer):
    return {name.removeprefix("model."): t for name, t in trainer.buffers.state().items() if name.endswith("bias_E")}


def check_that_a_difference_is_found(rank, trainer, biases):
    trainer.check_replicas()
    if trainer.groups.dense is None:
        return
    name = next(iter(sorted(biases)))
    biases[name][1] += 1e-6 * rank
    with pytest.raises(RuntimeError, match=f"disagree in {re.escape(name)}: replicas must stay bit-equal"):
        trainer.check_replicas()


def biased_steps_each(rank, configs):
    return [biased_steps(rank, config) for config in configs]


@pytest.mark.long
def test_biases_follow_the_loads_of_all_ranks_and_losses_are_the_same_in_every_layout(tmp_path):
    divisions = [{}, {"schedule": "1f1b", "recompute": "full"}, {"ep": 2}]
    configs = [settings(tmp_path / str(i), **{**OFTEN, **changes}) for i, changes in enumerate(divisions)]
    ranks = run_ranks(2, biased_steps_each, configs)
    for parts in zip(*ranks, strict=True):
        everywhere = {name for biases, _ in parts for name in biases}
        assert everywhere == {f"layers.{layer}.mlp.router.bias_E" for layer in (1, 2)}
        for name in everywhere:
            copies = [biases[name] for biases, _ in parts if name in biases]
            assert all(copy == copies[0] for copy in copies)

    ((_, alone),) = run_ranks(1, biased_steps, settings(tmp_path / "one", **OFTEN))
    kinds = ("loss", "grad_norm", "sequence_loss", "z_loss")
    for (_, together), _, _ in ranks[:1]:
        for ours, expected in zip(together, alone, strict=True):
            assert {k: ours[k] for k in kinds} == pytest.approx({k: expected[k] for k in kinds}, rel=1e-5)
            assert 1 <= ours["sequence_loss"] < MODEL.num_experts / MODEL.experts_per_token
            assert 0.5 < ours["z_loss"] / math.log(MODEL.num_experts) ** 2 < 2


CHOICES = [{}, {"overlap": False}, {"recompute": "attention"}, {"recompute": "full"}]


@pytest.mark.long
def test_overlap_recompute_and_resuming_are_bit_identical(tmp_path):
    often = OFTEN | {"model": dataclasses.replace(BALANCED, num_layers=2)}
    configs = [settings(tmp_path / str(i), **often, save_every=2, **choice) for i, choice in enumerate(CHOICES)]
    resume = str(tmp_path / "0" / "checkpoints" / "step-000002")
    configs.append(settings(tmp_path / "rest", **often, resume=resume))
    whole, *others, rest = map(without_clocks, run_ranks(2, train_each, configs)[0])
    for run, choice in zip(others, CHOICES[1:], strict=True):
        assert run == whole, choice
    assert len(losses(whole, "sequence_loss")) == 4
    assert rest[1:] == whole[3:]


def one_step_each(rank, configs):
    """Do one step of each run. Returns its recorded losses, its biases, and the names in its checkpoint."""
    seen = []
    for config in configs:
        trainer = make_trainer(rank, config)
        record = trainer.step(0).record
        biases = [m.bias_E for stage in trainer.stages.values() for m in stage.modules() if isinstance(m, Router)]
        assert all(bias is None or bias.dtype == torch.float32 for bias in biases)
        values = [None if bias is None else bias.tolist() for bias in biases]
        seen.append(({*record} & {"sequence_loss", "z_loss"}, values, {*trainer.state()}))
    return seen


def test_losses_and_biases_that_are_off_are_not_recorded_or_changed(tmp_path):
    model, still = dataclasses.replace(BALANCED, z_loss=0.0), {**OFTEN, "bias_rate": 0.0}
    configs = [
        settings(tmp_path / "a", **{**still, "model": model}),
        settings(tmp_path / "b", **{**still, "model": model}, dtype="bfloat16"),
        settings(tmp_path / "c", **{**still, "model": MODEL}),
    ]
    (seen,) = run_ranks(1, one_step_each, configs)
    for reported, biases, names in seen[:2]:
        assert reported == {"sequence_loss"}
        assert biases == [[0.0] * 4] * 2
        assert sum("bias" in name for name in names) == 2
    reported, biases, names = seen[2]
    assert reported == set()
    assert biases == [None] * 3
    assert not any("bias" in name for name in names)


def test_a_model_without_routers_records_no_losses(tmp_path):
    dense = dataclasses.replace(BALANCED, num_dense_layers=BALANCED.num_layers)
    ((reported, biases, _),) = run_ranks(1, one_step_each, [settings(tmp_path, **{**OFTEN, "model": dense})])[0]
    assert (reported, biases) == (set(), [])


def test_bias_rate_is_checked():
    assert parse_arguments([]).bias_rate == 3e-3
    assert parse_arguments(["--set", "bias_rate=0.02"]).bias_rate == 0.02
    with pytest.raises(ValueError, match=r"^bias_rate must be at least 0: got -0\.1"):
        make_run(["--set", "bias_rate=-0.1"])
