"""Persistent buffers of a custom layer: saved, exported, compared between replicas, and averaged on request."""

import dataclasses
import re

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moe_dualpipe.checkpoint import find_checkpoint, load_model, save_checkpoint
from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.cli import main
from tests.support import special_experts
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, change, losses, make_trainer, records, settings, skip_steps, train
from tests.support.special_experts import CountingExperts, DriftingExperts, RunningExperts, named

RUNNING = dataclasses.replace(SHALLOW, experts=named(RunningExperts))
COUNTING = dataclasses.replace(SHALLOW, experts=named(CountingExperts))
SMALL = {"model": RUNNING, "seq_len": 16, "eval_sequences": 1, "steps": 2}
MEANS = {f"layers.1.mlp.experts.mean.{expert}" for expert in range(SHALLOW.num_experts)}


def buffers_of(trainer):
    return {name: t.clone() for name, t in trainer.buffers.state().items()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())


# ---- Checkpoints and exports ----


def stop_and_resume(rank, first, second):
    """Train `first`, then `second` from its checkpoint after one step. Returns the losses of both."""
    half = f"{first.checkpoint.out}/checkpoints/step-000001"
    runs = [train(rank, change(first, save_every=1)), train(rank, change(second, resume=half))]
    return [(losses(run), losses(run, "validation_loss")[2]) for run in runs]


def saved_tensors(run, model):
    return global_weights(load_model(find_checkpoint(str(run)), model.experts))


@pytest.mark.parametrize("ranks,changes", [(2, {}), (2, {"pp": 1, "ep": 2, "zero": False})], ids=str)
@pytest.mark.long
def test_a_resumed_run_has_the_buffers_and_the_dropout_of_an_uninterrupted_one(tmp_path, ranks, changes):
    first = settings(tmp_path / "first", **{**SMALL, "model": COUNTING}, **changes)
    rest = change(first, out=str(tmp_path / "rest"))
    (whole, validation), (resumed, again) = run_ranks(ranks, stop_and_resume, first, rest)[0]
    assert resumed == {2: whole[2]}
    assert validation == again


@pytest.mark.long
def test_buffers_are_saved_expert_by_expert_and_exported(tmp_path):
    """A resumed run may have another --ep, and an export starts a run."""
    first = settings(tmp_path / "first", **SMALL)
    moved = change(first, out=str(tmp_path / "moved"), pp=1, ep=2)
    _, (resumed, _) = run_ranks(2, stop_and_resume, first, moved)[0]
    assert sorted(resumed) == [2]
    saved = saved_tensors(tmp_path / "first", RUNNING)
    assert {name for name in saved if "experts" in name and "up" not in name} == MEANS
    assert all(saved[name].any() for name in MEANS)

    given = str(tmp_path / "given")
    assert main(["export", str(tmp_path / "first"), "--out", given, "--experts", RUNNING.experts]) == 0
    assert same(load_file(f"{given}/model.safetensors"), saved)
    run_ranks(1, train, settings(tmp_path / "started", **{**SMALL, "steps": 1}, weights=given))
    end = losses(records(tmp_path / "first"), "validation_loss")[2]
    assert losses(records(tmp_path / "started"), "validation_loss")[0] == pytest.approx(end, rel=1e-5)


def resume_without_buffers(rank, config):
    """Resume from a checkpoint as earlier versions wrote it. Returns the error."""
    trainer = make_trainer(rank, config)
    state = {name: tensor for name, tensor in trainer.state().items() if ".mean." not in name}
    path = save_checkpoint(trainer.run.folder, 1, state, config.model)
    with pytest.raises(ValueError) as error:
        make_trainer(rank, change(config, resume=str(path)))
    return str(error.value)


@pytest.mark.long
def test_a_checkpoint_without_a_buffer_of_a_layer_is_an_error(tmp_path):
    (error,) = run_ranks(1, resume_without_buffers, settings(tmp_path, **SMALL))
    problem = "has no model.layers.1.mlp.experts.mean.0, and 3 more: the model that was saved had no such tensor; "
    way_out = "earlier versions saved no buffers of custom layers: persistent=False leaves a buffer out"
    assert error.endswith(problem + way_out)


# ---- Replicas ----


def averaged_steps(rank, config):
    """Compare averages with the buffers of all ranks; validate, and skip a step."""
    trainer = make_trainer(rank, config)
    group = trainer.groups.expert_replicas
    average = trainer.buffers.average
    compared = []

    def checked_average():
        before = buffers_of(trainer)
        average()
        after = buffers_of(trainer)
        for name in sorted(name for name in before if ".mean" in name):
            copies = [torch.empty_like(before[name]) for _ in range(dist.get_world_size(group))]
            dist.all_gather(copies, before[name], group=group)
            compared.append(not torch.equal(*copies))
            assert torch.equal(after[name], (copies[0] + copies[1]) / 2), name

    trainer.buffers.average = checked_average  # type: ignore[method-assign]
    for step in range(2):
        trainer.step(step)
        trainer.check_replicas()
    assert any(compared)

    before = buffers_of(trainer)
    trainer.validation_loss()
    assert same(buffers_of(trainer), before)

    with skip_steps(trainer):
        trainer.step(2)
    skipped = {name: t for name, t in buffers_of(trainer).items() if ".count" not in name}
    assert skipped
    assert all(torch.equal(t, before[name]) for name, t in skipped.items())
    trainer.step(3)
    assert not same(buffers_of(trainer), before)
    return [name for name in before if "router" not in name]


def test_named_buffers_are_averaged_after_each_step(tmp_path):
    seen = run_ranks(2, averaged_steps, settings(tmp_path, **{**SMALL, "model": COUNTING}))
    assert {*seen[0]} == {*seen[1]} == {f"model.{name}" for name in (*MEANS, "layers.1.mlp.experts.count")}


def drift(rank, config):
    trainer = make_trainer(rank, config)
    with pytest.raises(RuntimeError) as error:
        trainer.step(0)
    return str(error.value)


def test_buffers_that_drift_apart_are_an_error_after_the_first_step(tmp_path):
    drifting = dataclasses.replace(SHALLOW, experts=named(DriftingExperts))
    first, second = run_ranks(2, drift, settings(tmp_path, **{**SMALL, "model": drifting}))
    rule = "replicas must stay bit-equal, or be averaged (`averaged_buffers` of the layer)"
    assert first == second == f"ranks 0, 1 disagree in layers.1.mlp.experts.mean: {rule}"


# ---- Errors ----


def construction_errors(rank, configs):
    errors = []
    for config in configs:
        with pytest.raises(ValueError) as error:
            make_trainer(rank, config)
        errors.append(str(error.value))
    return errors


INVALID = {
    "MisspelledExperts": r"averaged_buffers names 'man', which is not a persistent buffer of this layer: it has mean$",
    "ScratchExperts": r"averaged_buffers names 'scratch', which is not a persistent buffer of this layer: it has mean$",
    "IntegerExperts": r"averaged_buffers names 'count', which is torch\.int64: only floats can be averaged$",
    "TextExperts": r"averaged_buffers must be a tuple of names: got 'mean'$",
}


def test_invalid_averaged_buffers_are_an_error_on_all_ranks(tmp_path):
    """Also on the rank of the first stage, whose layer is dense."""
    models = [dataclasses.replace(SHALLOW, experts=named(getattr(special_experts, layer))) for layer in INVALID]
    configs = [settings(tmp_path, **{**SMALL, "model": model}, schedule="1f1b") for model in models]
    recomputed = change(configs[0], model=RUNNING, recompute="full")
    first, second = run_ranks(2, construction_errors, [*configs, recomputed])
    assert first == second
    for error, (layer, message) in zip(first, INVALID.items(), strict=False):
        assert re.fullmatch(rf"{layer}\.{message}", error)
    twice = "--recompute full would change layers.1.mlp.experts.mean twice, once in backward: use --recompute attention"
    assert first[-1] == twice
