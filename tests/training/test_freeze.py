"""`--freeze PATTERN` gives the same run as layers that freeze their own parameters, in every layout."""

import dataclasses
from unittest import mock

import pytest
import torch
from torch import nn

from moe_dualpipe.models import TransformerStage
from moe_dualpipe.pipeline import pipeline as pipeline_module
from moe_dualpipe.runtime.optimizer import Optimizer
from moe_dualpipe.runtime.replicas import ReplicaSet
from moe_dualpipe.training.config import OptimizerConfig
from tests.support.pipelines import freeze
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, change, make_trainer, settings

EXPERTS_AND_EMBEDDING = ("*.experts.*", "embedding.weight")
SMALL = {"seq_len": 16, "eval_sequences": 1, "steps": 4, "optim": OptimizerConfig(lr=0.05, warmup_steps=0)}
MUON = OptimizerConfig("muon", lr=0.05, warmup_steps=0)


class FrozenStage(TransformerStage):
    """A stage whose layers freeze their parameters themselves."""

    def __init__(self, *args):
        super().__init__(*args)
        freeze(self, r"\.experts\.|^embedding\.weight$")


def parameters_of(trainer):
    return {name: p for stage in trainer.stages.values() for name, p in stage.named_parameters()}


def is_experts_or_embedding(name):
    return ".experts." in name or name == "embedding.weight"


def frozen_by_option_and_by_layer(rank, config):
    """Train three steps with `--freeze`, and with layers that freeze the same parameters; compare all bits."""
    trainer = make_trainer(rank, change(config, freeze=EXPERTS_AND_EMBEDDING))
    before = {name: p.detach().clone() for name, p in parameters_of(trainer).items()}
    with mock.patch.object(pipeline_module, "TransformerStage", FrozenStage):
        other = make_trainer(rank, config)
    for step in range(3):
        records = [{**one.step(step).record, "seconds": 0, "tokens_per_s": 0} for one in (trainer, other)]
        assert all(records[0][kind] == records[1][kind] for kind in ("loss", "grad_norm"))
    after, expected = parameters_of(trainer), parameters_of(other)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    frozen = {name for name in after if torch.equal(after[name], before[name])}
    assert frozen == {name for name in after if is_experts_or_embedding(name)} != set()
    state, its_state = trainer.optimizer.tensors(), other.optimizer.tensors()
    assert state.keys() == its_state.keys()
    assert all(torch.equal(state[name], its_state[name]) for name in state)
    trainer.check_replicas()


@pytest.mark.parametrize("ranks,changes", [
    (1, {}),
    (2, {}),
    (2, {"pp": 1, "ep": 2, "dtype": "bfloat16", "optim": MUON}),
    (2, {"pp": 1, "zero": False, "dtype": "bfloat16"}),
    (4, {"pp": 2, "ep": 2, "batch_size": 8, "model": dataclasses.replace(SHALLOW, mtp_layers=1)}),
], ids=lambda value: "" if isinstance(value, int) else ",".join(value))  # fmt: skip
@pytest.mark.quick("-pp,ep,dtype,optim")
def test_frozen_parameters_keep_all_bits_and_the_others_train_as_if_the_layer_had_frozen_them(
    tmp_path, ranks, changes
):  # fmt: skip
    run_ranks(ranks, frozen_by_option_and_by_layer, settings(tmp_path, **{**SMALL, **changes}))


@pytest.mark.parametrize("frozen", [True, False])
def test_freezing_after_the_optimizer_was_built_is_an_error(frozen):
    parameters = {name: nn.Parameter(torch.ones(3, 2)) for name in ("a", "b")}
    parameters["b"].requires_grad_(not frozen)
    optimizer = Optimizer([ReplicaSet(parameters, None)], OptimizerConfig())
    parameters["b"].requires_grad_(frozen)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        RuntimeError, match=r"^requires_grad of b changed after the optimizer was built: set it before$"
    ):
        optimizer.step(0.1, 1.0)
