"""Training with custom expert layers: global ids, the same run for any `--ep`, checkpoints, and errors on all ranks."""

import dataclasses
import re

import numpy as np
import pytest
import torch
from torch import nn

from moe_dualpipe.checkpoint.save import save_checkpoint
from moe_dualpipe.models import MoE
from tests.support.ranks import run_ranks
from tests.support.runs import ROOT, SHALLOW, TEXT, change, make_trainer, save, settings

LAYOUTS = (1, 2), (1, 1), (1, 4), (2, 2)
"""Numbers of pipeline and of expert-parallel ranks, of four ranks."""


def with_experts(name):
    return dataclasses.replace(SHALLOW, experts=f"tests.support.custom_experts:{name}")


def state_of(trainer):
    """The state as arrays: a tensor cannot be sent by a process that ends."""
    return {name: tensor.numpy().copy() for name, tensor in trainer.optimizer.tensors().items()}


def run_in_all_layouts(rank, config):
    """For each layout: the initial state and the loss, the state after loading the checkpoint of the first, the ids."""
    steps, loaded, ids, checkpoint = {}, {}, {}, None
    for pp, ep in LAYOUTS:
        out = f"{config.checkpoint.out}/{pp}-{ep}"
        layout = change(config, out=out, pp=pp, ep=ep, schedule="dualpipe" if pp > 1 else "1f1b")
        trainer = make_trainer(rank, layout)
        steps[pp, ep] = state_of(trainer), trainer.step(0).record["loss"]
        layers = [layer for stage in trainer.stages.values() for layer in stage.modules() if isinstance(layer, MoE)]
        ids[pp, ep] = [getattr(layer.experts, "ids", None) for layer in layers]
        if checkpoint is None:
            checkpoint = save(trainer, 1)
            loaded["saved"] = state_of(trainer)
        else:
            loaded[pp, ep] = state_of(make_trainer(rank, change(layout, resume=str(checkpoint))))
    return steps, loaded, ids


def merged(states):
    """The state of all ranks. What several ranks hold must be equal."""
    whole = {}
    for name, values in (item for state in states for item in state.items()):
        assert np.array_equal(values, whole.setdefault(name, values)), name
    return whole


def assert_equal(state, expected):
    assert set(state) == set(expected)
    for name, values in state.items():
        assert np.array_equal(values, expected[name]), name


@pytest.mark.parametrize("name", ["Listed", "ListsOfStacks"])
@pytest.mark.long
def test_runs_with_any_number_of_expert_parallel_ranks_start_and_train_alike(tmp_path, name):
    """With `Listed`, experts 0 and 1 are null: with `--ep 4`, two ranks have no expert parameters at all."""
    data = (f"{TEXT}/message.py",)
    config = settings(tmp_path, model=with_experts(name), seq_len=16, batch_size=8, data=data)
    ranks = run_ranks(4, run_in_all_layouts, config)
    states = {layout: merged(steps[layout][0] for steps, _, _ in ranks) for layout in ranks[0][0]}
    kinds = {
        ".".join(part for part in key.split(".") if not part.isdigit()) for key in states[1, 1] if ".experts." in key
    }
    of = {"Listed": ["each.weight", "each.bias"], "ListsOfStacks": ["stages.weight"]}[name]
    assert kinds == {f"{kind}.layers.mlp.experts.{t}" for kind in ("model", "exp_avg", "exp_avg_sq") for t in of}
    for state in states.values():
        assert_equal(state, states[1, 1])
    losses = {ep: loss for (pp, ep), (_, loss) in ranks[0][0].items() if pp == 1}
    assert losses == pytest.approx(dict.fromkeys(losses, losses[1]), rel=1e-6)
    after = {layout: merged(loaded[layout] for _, loaded, _ in ranks) for layout in ranks[0][1]}
    for state in after.values():
        assert_equal(state, after["saved"])
    if name == "Listed":
        for (pp, ep), found in ((layout, [ids[layout] for _, _, ids in ranks]) for layout in ranks[0][2]):
            per = 4 // ep
            expected = [range(rank % ep * per, rank % ep * per + per) for rank in range(4)]
            assert [set(of_rank) for of_rank in found] == [{ids} for ids in expected], (pp, ep)


def train_the_example(rank, config, folder):
    found = []
    for ep in (1, 2):
        trainer = make_trainer(rank, change(config, out=f"{folder}/{ep}", ep=ep))
        found.append((trainer.count_parameters()[1], [trainer.step(step).record["loss"] for step in range(2)]))
    return found


@pytest.mark.long
def test_the_example_of_the_documentation_has_two_null_experts_with_any_number_of_ranks(tmp_path):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "custom_layers.md").read_text(), re.DOTALL)
    (tmp_path / "null_experts.py").write_text(next(block for block in code if "def some_null_experts" in block))
    model = dataclasses.replace(SHALLOW, experts=f"{tmp_path}/null_experts.py:some_null_experts")
    config = settings(tmp_path, model=model, pp=1, data=(f"{TEXT}/message.py",))
    (count, losses), (count_with_2, losses_with_2) = run_ranks(2, train_the_example, config, tmp_path)[0]
    assert losses == pytest.approx(losses_with_2, rel=1e-6)
    assert losses[0] != losses[1]
    width, inner, layers = SHALLOW.hidden_size, SHALLOW.expert_size, SHALLOW.num_layers - SHALLOW.num_dense_layers
    assert count == count_with_2 == layers * (SHALLOW.num_experts - 2) * (2 * width * inner + width + inner)


def resume_with_older_names(rank, config):
    trainer = make_trainer(rank, config)
    trainer.step(0)
    older = {}
    for name, tensor in trainer.state().items():  # the list of the rank with experts 2 and 3: each.3 -> each.1, 2-3
        match = re.fullmatch(r"(.*\.each\.)(\d+)(\..*)", name)
        start = 2 * rank
        older[f"{match[1]}{int(match[2]) - start}{match[3]}.{start}-{start + 1}" if match else name] = tensor.clone()
    checkpoint = save_checkpoint(trainer.run.folder, 1, older, config.model)
    resumed = make_trainer(rank, change(config, out=f"{config.checkpoint.out}/resumed", resume=str(checkpoint)))
    assert_equal(state_of(resumed), state_of(trainer))
    return sum(".each." in name for name in set(older) - set(trainer.state()))


@pytest.mark.long
def test_a_checkpoint_that_saved_lists_whole_still_loads(tmp_path):
    config = settings(tmp_path / "run", model=with_experts("Listed"), ep=2, pp=1, data=(f"{TEXT}/message.py",))
    assert run_ranks(2, resume_with_older_names, config) == [0, 2 * 3 * 2]  # experts 0 and 1 have no weights


def build_error(rank, config):
    with pytest.raises(ValueError) as error:
        make_trainer(rank, config)
    return str(error.value)


def test_an_expert_that_cannot_be_built_on_one_rank_is_an_error_on_all(tmp_path):
    config = settings(tmp_path, model=with_experts("FailsFor2"), ep=2, pp=1, data=(f"{TEXT}/message.py",))
    first, second = run_ranks(2, build_error, config)
    assert first == second
    assert "stages.1.weight.2 has shape [32, 32] in a layer with experts 2-3, and no tensor in one with" in first


class Late(nn.Module):
    """Creates a parameter in its first forward."""

    def __init__(self, config, num_local_experts):
        super().__init__()
        self.up = nn.Parameter(torch.ones(num_local_experts, config.hidden_size))

    def forward(self, x_MD, expert_offsets):
        if not hasattr(self, "late"):
            self.late = nn.Parameter(torch.ones(1))
        return x_MD * self.late


def step_error(rank, config):
    trainer = make_trainer(rank, config)
    with pytest.raises(RuntimeError) as error:
        trainer.step(0)
    return str(error.value)


def test_a_parameter_that_is_created_in_forward_is_an_error(tmp_path):
    """It would be neither trained nor saved."""
    model = dataclasses.replace(SHALLOW, experts="tests.training.test_custom_experts:Late")
    for error in run_ranks(2, step_error, settings(tmp_path, model=model, data=(f"{TEXT}/message.py",))):
        assert re.match(r"layers\.\d\.mlp\.experts\.late was created after the optimizer was built: create it", error)
