"""Weights and batches that a program passes to `train`: the same bits as from a checkpoint and from text."""

import dataclasses
import re

import pytest
import torch

from moe_dualpipe import load_data, train
from moe_dualpipe.checkpoint import find_checkpoint, load_model
from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.cli import main
from moe_dualpipe.expert_parallel.parameters import expert_ids, global_tensors
from moe_dualpipe.models import StageOptions, build_model
from moe_dualpipe.runtime.launch import Launch
from moe_dualpipe.training.options import Request
from moe_dualpipe.training.preflight import Given, prepare
from moe_dualpipe.training.step import Trainer
from tests.support.own_layers import ExpertList
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, TEXT, change, losses, settings

WITHOUT_TEXT = ("nowhere",)  # no text is read when batches are given


class Log:
    def __init__(self):
        self.records = []
        self.log = self.records.append


def run(config, **given):
    """The records of a run without a folder, and its trainer."""
    log = Log()
    trainer = train(change(config, out=None), log=[log], verbose=False, **given)
    return log.records, trainer


def parameters_of(trainer):
    return {name: tensor for stage in trainer.stages.values() for name, tensor in stage.state_dict().items()}


def whole_batches(text, config):
    """The batches that a run draws itself."""
    count, seq_len = config.batch.batch_size, config.batch.seq_len

    def batches(step):
        inputs, labels = text.batch(config.seed, step, count, seq_len)
        return inputs, labels.int()

    total = -(-config.metrics.eval_sequences // count) * count
    return batches, text.held_out_batch(0, total, total, seq_len)


def given_batches_and_text(_rank, config):
    expected, trainer = run(config)
    text, calls = load_data(TEXT, config.batch.seq_len), []
    batches, validation = whole_batches(text, config)
    given = change(config, data=WITHOUT_TEXT)
    found, other = run(given, batches=lambda step: (calls.append(step), batches(step))[1], validation=validation)
    for kind in ("loss", "grad_norm", "validation_loss"):
        assert losses(found, kind) == losses(expected, kind), kind
    assert calls == [*range(config.steps)]
    after, its = parameters_of(trainer), parameters_of(other)
    assert all(torch.equal(after[name], its[name]) for name in its)
    without, _ = run(given, batches=batches)
    assert losses(without) == losses(found)
    assert not losses(without, "validation_loss")
    return losses(found, "validation_loss")


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {}), (2, {"pp": 1, "ep": 2})], ids=str)
@pytest.mark.quick("1-{}")
def test_given_batches_have_the_losses_of_the_same_batches_from_text(ranks, changes):
    config = settings("nowhere", steps=3, **changes)
    assert run_ranks(ranks, given_batches_and_text, config)[0].keys() == {0, 3}  # the first rank has the records


def given_run(rank, config, **given):
    world_size = torch.distributed.get_world_size()
    launch = Launch(rank, rank, world_size, world_size)
    return prepare(Request(change(config, out=None)), launch, Given(**given), from_command=False)


def start_from(rank, config, weights):
    """Start from the given weights; compare all that this rank holds with them."""
    trainer = Trainer(given_run(rank, config, weights=weights))
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
    return trainer.step(0).record["loss"]


@pytest.mark.parametrize("experts,ranks,changes", [
    ("swiglu", 1, {}),
    ("swiglu", 2, {}),
    ("swiglu", 2, {"pp": 1, "ep": 2, "zero": False}),
    (ExpertList, 1, {}),
    (ExpertList, 4, {"pp": 2, "ep": 2, "batch_size": 8, "dtype": "bfloat16"}),
], ids=str)  # fmt: skip
@pytest.mark.quick(
    "swiglu-1-{}",
    "<class 'tests.support.own_layers.ExpertList'>-4-{'pp': 2, 'ep': 2, 'batch_size': 8, 'dtype': 'bfloat16'}",
)
def test_every_rank_copies_what_it_holds_of_given_weights(tmp_path, experts, ranks, changes):
    """The names are those of checkpoints, or of the state dict of a whole model."""
    model = dataclasses.replace(SHALLOW, experts=experts, router_bias=True)
    config = settings(tmp_path, model=model, **changes)
    other = build_model(model, options=StageOptions(seed=5))
    for name, buffer in other.named_buffers():
        if name.endswith("bias_E"):
            buffer.normal_()
    run_ranks(ranks, start_from_both, config, global_weights(other), other.state_dict())


def start_from_both(rank, config, by_checkpoint, by_state_dict):
    expected = start_from(rank, config, by_checkpoint)
    assert Trainer(given_run(rank, config, weights=by_state_dict)).step(0).record["loss"] == expected


def test_given_weights_and_a_folder_start_the_same_run(tmp_path):
    config = settings(tmp_path / "run", steps=2)
    train(config, verbose=False)
    assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "given")]) == 0
    weights = load_model(find_checkpoint(str(tmp_path / "run"))).state_dict()
    expected, _ = run(change(config, weights=str(tmp_path / "given")))
    found, _ = run(config, weights=weights)
    assert losses(found) == losses(expected)
    assert losses(found, "validation_loss") == losses(expected, "validation_loss")
    assert losses(found, "lr") == losses(expected, "lr") == {1: 0.0015, 2: 0.003}  # warm-up, from zero


# ---- Errors ----


def error_of(rank, config, given):
    """The error of a run in which each rank is given `given[rank]`, before its first step."""
    with pytest.raises(ValueError) as error:
        Trainer(given_run(rank, config, **given[rank]))
    return str(error.value)


def errors_of(rank, config, weights):
    return [error_of(rank, config, [{"weights": each}] * 2) for each in weights]


def without(weights, *names):
    return {name: tensor for name, tensor in weights.items() if name not in names}


def test_given_weights_that_do_not_fit(tmp_path):
    """Every rank raises the same line, also if only another rank holds the weight."""
    config, weights = settings(tmp_path, schedule="1f1b"), build_model(SHALLOW).state_dict()
    stacked = "layers.1.mlp.experts.down"
    wrong = [
        (without(weights, "head.weight"), "`weights` has no head.weight: it must have all weights of the model"),
        (without(weights, stacked), "`weights` has no layers.1.mlp.experts.down.0: it must have all"),
        (weights | {"extra.3": torch.ones(1), "extra.4": torch.ones(1)},
         "`weights` has names that the model does not have: extra.3 (and 1 like it)"),
        (weights | {"head.weight": torch.ones(3)}, "`weights`: head.weight has shape [3], expected [256, 32]"),
        (weights | {stacked: torch.ones(3, 2)},
         "`weights`: layers.1.mlp.experts.down must stack the 4 experts of the layer: got [3, 2]"),
        (weights | {"head.weight": 1.0}, "`weights`: head.weight is not a tensor, but float"),
        (weights | {stacked: None}, "`weights`: layers.1.mlp.experts.down must stack the 4 experts of the layer: got"),
    ]  # fmt: skip
    first, second = run_ranks(2, errors_of, config, [given for given, _ in wrong])
    assert first == second
    for found, (_, message) in zip(first, wrong, strict=True):
        assert found.startswith(message)


def tokens(*shape, value=0):
    return torch.full(shape, value, dtype=torch.int64)


GOOD = (tokens(4, 32), tokens(4, 32))


def test_given_batches_that_do_not_fit(tmp_path):
    config = settings(tmp_path)
    shape = r"must be (inputs, labels), each [4, 32]: got"
    wrong = [
        ((tokens(4, 32), tokens(4, 31)), f"batches(0) {shape} [4, 32], [4, 31]"),
        ((tokens(2, 32), tokens(2, 32)), f"batches(0) {shape} [2, 32], [2, 32]"),
        (tokens(4, 33), f"batches(0) {shape} [4, 33]"),
        (None, f"batches(0) {shape} NoneType"),
        ((tokens(4, 32).float(), tokens(4, 32)), "batches(0): inputs must be token ids, integers: got torch.float32"),
        ((tokens(4, 32, value=256), tokens(4, 32)), "batches(0): inputs must be from 0 to 255: got 256"),
        ((tokens(4, 32), tokens(4, 32, value=-1)),
         "batches(0): labels must be from 0 to 255, or -100 for one to ignore: got -1"),
    ]  # fmt: skip
    for batch, message in wrong:
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            train(change(config, out=None), verbose=False, batches=lambda _, batch=batch: batch)
    for rows in (0, 3, 6):
        message = f"validation must be (inputs, labels), each a multiple of [4, 32]: got [{rows}, 32], [{rows}, 32]"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            train(
                change(config, out=None), verbose=False, batches=lambda _: GOOD,
                validation=(tokens(rows, 32), tokens(rows, 32)),
            )  # fmt: skip


def unequal_batches(rank, config):
    def batches(_step):
        return tokens(4, 32, value=rank), GOOD[1]

    return error_of(rank, config, [{"batches": batches}] * 2)


def failing_batches(rank, config):
    def batches(_step):
        if rank == 1:
            raise KeyError("no file")
        return GOOD

    return error_of(rank, config, [{"batches": batches}] * 2)


def test_batches_that_are_not_the_same_on_all_ranks(tmp_path):
    config = settings(tmp_path)
    first, second = run_ranks(2, unequal_batches, config)
    assert first == second == (
        "`batches` are not the same on all ranks: those of 1 rank (1) differ from those of rank 0; pass the sequences "
        "of the whole step on every rank"
    )  # fmt: skip
    first, second = run_ranks(2, failing_batches, config)
    assert first == second
    assert re.search(r"test_given\.py:\d+ in batches: KeyError: 'no file'", first)


@pytest.mark.parametrize("changes,given,message", [
    ({"weights": "a"}, {"weights": {}}, "`weights` and CheckpointConfig(weights=...) both say where to start: use one"),
    ({"resume": "a"}, {"weights": {}}, "`weights` and CheckpointConfig(resume=...) both say where to start: use one"),
    ({}, {"validation": GOOD}, "`validation` needs `batches`: without them, the held-out text of the data is used"),
    ({"eval_every": 3}, {"batches": lambda _: GOOD}, "eval_every=3 with `batches` needs `validation`"),
    ({"document_mask": True}, {"batches": lambda _: GOOD}, "--document-mask: these token ids do not tell where"),
], ids=["weights", "resume", "validation", "eval_every", "document_mask"])  # fmt: skip
def test_options_that_contradict_what_is_given(tmp_path, changes, given, message):
    with pytest.raises(ValueError) as error:
        train(change(settings(tmp_path), **changes), verbose=False, **given)
    assert str(error.value).startswith(message)


def test_a_run_without_validation_prints_none(tmp_path, capfd):
    config = settings(tmp_path / "run", steps=2, save_every=1)
    trainer = train(config, batches=lambda _: GOOD)
    printed = capfd.readouterr().out
    assert "data: batches of the program\n" in printed and "validation loss" not in printed and "sample:" not in printed
    with pytest.raises(ValueError, match="validation_loss needs held-out sequences: pass them to `train` as `validat"):
        trainer.validation_loss()
    assert len(trainer.sample("1 2 3", 4).split()) == 4  # token ids: the program knows what they mean
    resumed = train(change(config, steps=3, resume=str(tmp_path / "run")), batches=lambda _: GOOD)
    assert resumed.run.first_step == 2
