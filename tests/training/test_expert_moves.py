"""Experts that move between ranks: the same losses and weights, bit for bit, and loads as predicted."""

import dataclasses

import pytest
import torch

from moe_dualpipe.expert_parallel.placement import imbalance, in_order
from tests.support.own_layers import ExpertList
from tests.support.ranks import run_ranks
from tests.support.runs import (
    SHALLOW,
    make_trainer,
    settings,
    without_clocks,
)

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


def run_each(rank, configs):
    return [run_steps(rank, config) for config in configs]


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
    seen = run_ranks(ranks, run_each, [plain, moving])
    assert sum(step["moved_experts"] for step in seen[0][1][0]) > 2
    for step in seen[0][1][0]:
        assert step["rank_load_after"] <= step["rank_load_before"]
    assert without_moves(seen[0][0][0]) == without_moves(seen[0][1][0])
    states = [{name: tensor for of_rank in seen for name, tensor in of_rank[i][1].items()} for i in (0, 1)]
    assert {*states[0]} == {*states[1]}
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
