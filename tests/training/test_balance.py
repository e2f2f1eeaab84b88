"""Extensions of runs: biases of routers on all ranks, experts that move without a change of any bit, and dropout."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from moe_dualpipe.expert_parallel.placement import imbalance, in_order
from moe_dualpipe.models.load_statistics import describe_loads
from moe_dualpipe.training.extensions import Update
from moe_dualpipe.training.extensions.balance import Balancing, describe_balancing
from tests.support.own_layers import ExpertList
from tests.support.ranks import each, run_ranks
from tests.support.runs import (
    MODEL,
    SHALLOW,
    make_trainer,
    settings,
    skip_steps,
    without_clocks,
)
from tests.support.special_experts import DropoutExperts, named

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


def biases_of(trainer):
    return {name.removeprefix("model."): t for name, t in trainer.buffers.state().items() if name.endswith("bias_E")}


def test_biases_follow_the_loads_of_all_ranks_in_every_layout(tmp_path):
    divisions = [{"schedule": "1f1b", "recompute": "full"}, {"ep": 2}]
    configs = [settings(tmp_path / str(i), **{**OFTEN, **changes}) for i, changes in enumerate(divisions)]
    ranks = run_ranks(2, each, biased_steps, configs)
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


EIGHT = dataclasses.replace(SHALLOW, num_layers=3, num_experts=8, experts_per_token=3, router_bias=True)
SMALL = {"model": EIGHT, "ep": 2, "seq_len": 16, "steps": 4, "expert_sums": "choice"}
MOVES = {"move_experts_every": 1, "move_experts_gain": 0.0}
OF_MOVES = ("rank_load_max_over_mean", "rank_load_before", "rank_load_after", "moved_experts")


def run_steps(rank, config):
    """The records and, by name, the state of this rank after all steps."""
    trainer = make_trainer(rank, config)
    steps = [trainer.step(step).record for step in range(config.steps)]
    trainer.check_replicas()
    return steps, {name: t.float().numpy().copy() for name, t in trainer.state().items()}


def without_moves(steps):
    return [{key: value for key, value in step.items() if key not in OF_MOVES} for step in without_clocks(steps)]


@pytest.mark.parametrize("ranks,optimizer,options", [
    (2, "adamw", {"pp": 1, "steps": 2, "model": dataclasses.replace(EIGHT, experts=ExpertList)}),
    pytest.param(4, "muon", {"pp": 1, "batch_size": 8, "dtype": "bfloat16", "ep_backend": "all_to_all", "steps": 3},
                 marks=pytest.mark.long),
    pytest.param(2, "adamw", {"pp": 1, "freeze": ("*.experts.down.*",)}, marks=pytest.mark.long),
    pytest.param(4, "adamw", {"pp": 2, "batch_size": 8, "recompute": "full"}, marks=pytest.mark.long),
    pytest.param(4, "adamw", {"pp": 1, "batch_size": 8, "ep": 4, "zero": False}, marks=pytest.mark.long),
])  # fmt: skip
def test_moves_change_no_bit(tmp_path, ranks, optimizer, options):
    plain = settings(tmp_path / "plain", **{**SMALL, **options})
    plain = dataclasses.replace(plain, optim=dataclasses.replace(plain.optim, name=optimizer))
    moving = dataclasses.replace(plain, parallel=dataclasses.replace(plain.parallel, **MOVES))
    seen = run_ranks(ranks, each, run_steps, [plain, moving])
    assert sum(step["moved_experts"] for step in seen[0][1][0]) > 2
    for step in seen[0][1][0]:
        assert step["rank_load_after"] <= step["rank_load_before"]
    assert without_moves(seen[0][0][0]) == without_moves(seen[0][1][0])
    states = [{name: tensor for of_rank in seen for name, tensor in of_rank[i][1].items()} for i in (0, 1)]
    assert {*states[1]} - {*states[0]} == {"expert_slots", "expert_loads"}
    for name, tensor in states[0].items():
        assert (tensor == states[1][name]).all(), name


def measured_loads(rank, config):
    """Loads of each step, and records, of a run that decides after every second step, and never moves."""
    trainer = make_trainer(rank, config)
    loads, load = [], trainer.balance.loads
    trainer.balance.loads = lambda device: loads.append(load(device)) or loads[-1]  # type: ignore[method-assign]
    steps = [trainer.step(step).record for step in range(4)]
    return [load_LE.tolist() for load_LE in loads], steps


def test_a_decision_counts_the_loads_since_the_last_one(tmp_path):
    changes = {"pp": 1, "move_experts_every": 2, "move_experts_gain": 1.0}
    loads, steps = run_ranks(2, measured_loads, settings(tmp_path, **{**SMALL, **changes}))[0]
    for last in (1, 3):
        both = (torch.tensor(loads[last - 1]) + torch.tensor(loads[last])).tolist()
        ratios = imbalance(in_order(2, 8, 2).gpu_loads(both))
        assert steps[last]["rank_load_before"] == round(sum(ratios) / 2, 4) and not steps[last]["moved_experts"]
        assert "rank_load_before" not in steps[last - 1]


# ---- Dropout is on in training, off in validation and samples ----


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


# ---- A collapse is noticed ----


def watched(loads_PLE, **model):
    """The notes of steps with these loads, by step."""
    rows = {layer + 1: layer for layer in range(loads_PLE.shape[1])}
    balance = SimpleNamespace(rows=rows, rate=0.003, after_step=lambda *_, **__: {})
    config = SimpleNamespace(model=dataclasses.replace(MODEL, **model))
    balancing = Balancing(SimpleNamespace(pipeline=SimpleNamespace(balance=balance, device=None), config=config))
    notes = {}
    for step, load_LE in enumerate(loads_PLE):
        update = Update(step, 1.0, 1.0, load_LE)
        balancing.after_update(update)
        if update.notes:
            notes[step + 1] = update.notes
    return notes


def growing(steps, growth=1.0):
    """Loads of 4 experts of two layers: those of the first are even, and in the second one expert gets ever more."""
    even = torch.full((steps, 4), 1000)
    more = even.clone()
    more[:, 0] += (torch.arange(steps) * growth).long()
    return torch.stack([even, more], 1)


@pytest.mark.parametrize(("model", "advice"), [
    ({}, "use --set model.sequence_loss=0.001"),
    ({"sequence_loss": 0.01}, "use a larger model.sequence_loss than 0.01"),
    ({"router_bias": True}, "use a larger bias_rate than 0.003"),
])  # fmt: skip
def test_a_growing_imbalance_is_reported_once_with_what_helps(model, advice):
    assert watched(growing(250), **model) == {
        100: [f"step 100: MaxVio of layer 2 grew for 100 steps, from 0.00 to 0.07; {advice}"]
    }


def test_an_imbalance_that_stays_or_varies_is_no_collapse():
    constant, noise = growing(1)[0].repeat(250, 1, 1), torch.Generator().manual_seed(0)
    constant[:, 1, 0] = 3000
    assert not watched(constant)
    assert not watched(torch.randint(900, 1100, (250, 2, 4), generator=noise))


def test_a_group_of_experts_that_stays_empty_is_reported():
    loads = torch.full((150, 2, 4), 10)
    loads[20:, 1, 2:] = 0
    message = "group 1 of the experts of layer 2 got no token in 100 steps; use --set model.sequence_loss=0.001"
    assert watched(loads, expert_groups=2) == {120: [f"step 120: {message}"]}
    assert not watched(loads)  # without groups, a router may leave an expert out


def test_a_long_run_of_a_dense_model_has_no_loads_to_report():
    assert not watched(torch.zeros(150, 0, 4, dtype=torch.int64))


def test_loads_are_described_in_one_line():
    loads = torch.tensor([[400, 400, 400, 400], [1000, 597, 0, 3]])
    assert describe_loads([1, 3], loads) == (
        "expert loads: MaxVio 0.75, 1.50 in layer 3; 2 of 8 experts got less than 1% of the mean"
    )
    assert describe_loads([], torch.zeros(0, 4)) == ""


def test_what_balances_the_experts_is_said():
    assert describe_balancing(MODEL, 0.003) == "experts are balanced by nothing: use model.sequence_loss"
    assert describe_balancing(BALANCED, 0.003) == (
        "experts are balanced by biases of the routers, by 0.003 a step and a sequence-wise loss with factor 0.02"
    )
    assert describe_balancing(dataclasses.replace(MODEL, num_dense_layers=MODEL.num_layers), 0.003) == ""
