"""Weights and batches that a program passes to `train`: the same bits as from a checkpoint and from text."""

import dataclasses

import pytest
import torch

from moe_dualpipe import load_data
from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.expert_parallel.parameters import expert_ids, global_tensors
from moe_dualpipe.models import StageOptions, build_model
from tests.support.own_layers import ExpertList
from tests.support.ranks import run_ranks
from tests.support.runs import (
    SHALLOW,
    TEXT,
    change,
    equal_tensors,
    losses,
    make_trainer,
    settings,
    train_in_memory,
    weights_of,
)

WITHOUT_TEXT = ("nowhere",)  # no text is read when batches are given


def whole_batches(text, config):
    """The batches that a run draws itself."""
    count, seq_len = config.batch.batch_size, config.batch.seq_len

    def batches(step):
        inputs, labels, _ = text.batch(config.seed, step, count, seq_len)
        return inputs, labels.int()

    total = -(-config.metrics.eval_sequences // count) * count
    return batches, text.held_out_batch(0, total, total, seq_len)


def given_batches_and_text(_rank, config):
    expected, trainer = train_in_memory(config)
    text, calls = load_data(TEXT, config.batch.seq_len), []
    batches, validation = whole_batches(text, config)
    given = change(config, data=WITHOUT_TEXT)
    found, other = train_in_memory(
        given, batches=lambda step: (calls.append(step), batches(step))[1], validation=validation
    )
    for kind in ("loss", "grad_norm", "validation_loss"):
        assert losses(found, kind) == losses(expected, kind), kind
    assert calls == [*range(config.steps)]
    assert equal_tensors(weights_of(trainer), weights_of(other))
    without, _ = train_in_memory(given, batches=batches)
    assert losses(without) == losses(found)
    assert not losses(without, "validation_loss")
    return losses(found, "validation_loss")


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {}), (2, {"pp": 1, "ep": 2})], ids=str)
@pytest.mark.quick("1-{}")
def test_given_batches_have_the_losses_of_the_same_batches_from_text(ranks, changes):
    config = change(settings("nowhere", steps=3, **changes), out=None)
    assert run_ranks(ranks, given_batches_and_text, config)[0].keys() == {0, 3}  # the first rank has the records


def start_from(rank, config, weights):
    """Start from the given weights; compare all that this rank holds with them."""
    trainer = make_trainer(rank, config, weights=weights)
    assert trainer.stages
    for stage in trainer.stages.values():
        ids = expert_ids(stage)
        for name, tensor in stage.state_dict().items():
            for global_name, view in global_tensors(name, tensor, ids.get(name)):
                assert torch.equal(view, weights[global_name].to(view.dtype)), global_name
    for name, tensor in trainer.state().items():
        if name.startswith("model."):
            assert torch.equal(tensor, weights[name.removeprefix("model.")]), name  # the fp32 master weights
    trainer.check_replicas()
    trainer.step(0)


@pytest.mark.parametrize("experts,ranks,changes", [
    ("swiglu", 1, {}),
    ("swiglu", 2, {}),
    ("swiglu", 2, {"pp": 1, "ep": 2, "zero": False}),
    ("tests.support.special_experts:LowRankExperts", 2, {"pp": 1}),  # frozen: other ranks own some of the weights
    (ExpertList, 1, {}),
    (ExpertList, 4, {"pp": 2, "ep": 2, "batch_size": 8, "dtype": "bfloat16"}),
], ids=["one", "two", "ep", "frozen", "list", "four"])  # fmt: skip
@pytest.mark.quick("frozen")
def test_every_rank_copies_what_it_holds_of_given_weights(tmp_path, experts, ranks, changes):
    model = dataclasses.replace(SHALLOW, experts=experts, router_bias=True)
    config = settings(tmp_path, model=model, **changes)
    other = build_model(model, options=StageOptions(seed=5))
    for name, buffer in other.named_buffers():
        if name.endswith("bias_E"):
            buffer.normal_()
    run_ranks(ranks, start_from, config, global_weights(other))
