"""Runs whose loss or gradients are not finite: they end with an error that names the place, and save nothing of it."""

import contextlib
import dataclasses
import io
from pathlib import Path

import pytest
import torch

from moe_dualpipe.checkpoint import list_checkpoints
from moe_dualpipe.commands.train import main
from moe_dualpipe.expert_parallel import Combined, Completed
from moe_dualpipe.training.loop import train_loop
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, SMALL, change, make_trainer, save
from tests.support.runs import settings as shallow_settings

NAN, INF = float("nan"), float("inf")
ADVICE = "resume from an earlier one with a lower --lr, or check the data"
STOPS = f"the run stops without a checkpoint: {ADVICE}"


def settings(out, **changes):
    """With two layers a stage: the first of them that is not finite is named, not the one after it."""
    return shallow_settings(out, **{"model": MODEL, **changes})


def failing_run(rank, config, spoil, *arguments):
    """Do a run after `spoil(trainer, ...)`, which must fail. Returns what it prints on stderr."""
    trainer = make_trainer(rank, config)
    spoil(trainer, *arguments)
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as exit_:
        train_loop(trainer)
    assert exit_.value.code == 1
    return printed.getvalue()


def error_of(ranks, config, spoil, *arguments):
    """The error of a failing run: the last line on rank 0. The other ranks print nothing."""
    first, *others = run_ranks(ranks, failing_run, config, spoil, *arguments)
    assert others == [""] * (ranks - 1)
    return first.splitlines()[-1].removeprefix("train.py: error: ")


def checkpoints(config):
    return [path.name for path in list_checkpoints(Path(config.checkpoint.out, "checkpoints"))]


def blocks(trainer, layer):
    return [stage.layers[str(layer)] for stage in trainer.stages.values() if str(layer) in stage.layers]


def change_output(trainer, layer, method, changed, ranks=None):
    """On some ranks, apply `changed(output, trainer)` to the first output of a method of a block or of its MLP."""
    for block in blocks(trainer, layer) if ranks is None or trainer.layout.rank in ranks else ():
        owner = block if hasattr(block, method) else block.mlp

        def run(*inputs, original=getattr(owner, method), **options):  # noqa: B008
            outputs = original(*inputs, **options)
            if isinstance(outputs, torch.Tensor):
                return changed(outputs, trainer)
            return changed(outputs[0], trainer), *outputs[1:]

        setattr(owner, method, run)


def nan(x, _):
    return x * NAN


# ---- The validation loss ----


@pytest.mark.parametrize("ranks,changes,layer,method,place", [
    (1, {}, 0, "dense_mlp", "layer 0, segment mlp (stage 0, rank 0)"),
    (2, {}, 3, "attend_and_route", "layer 3, segment attn (stage 1, rank 1)"),
    (2, {"pp": 1, "ep": 2}, 1, "run_experts", "layer 1, segment mlp (stage 0, rank 1)"),
    (4, {"pp": 2, "ep": 2, "batch_size": 8}, 2, "run_experts", "layer 2, segment mlp (stage 1, rank 1)"),
], ids=str)  # fmt: skip
def test_a_validation_loss_that_is_nan_before_the_first_step(tmp_path, ranks, changes, layer, method, place):
    config = settings(tmp_path, steps=2, seq_len=16, **changes)
    error = error_of(ranks, config, change_output, layer, method, nan, [ranks > 1])
    assert error == f"the validation loss before step 1 is nan: the first non-finite output is that of {place}"
    assert checkpoints(config) == []
    assert not (tmp_path / "metrics.jsonl").exists()


def corrupt_combine(trainer, layer):
    for block in blocks(trainer, layer):
        block.mlp.expert_parallel.combine = lambda y_ND, *_: Completed(Combined(y_ND * INF, None))


def test_a_transfer_that_corrupts_data_is_named(tmp_path):
    error = error_of(1, settings(tmp_path, seq_len=16, schedule="1f1b"), corrupt_combine, 2)
    assert error == (
        "the validation loss before step 1 is nan: the first non-finite output is that of layer 1, segment "
        "combine (stage 0, rank 0)"
    )


@torch.no_grad()
def spoil_weight(trainer, part, ranks):
    for stage in trainer.stages.values() if trainer.layout.rank in ranks else ():
        for name, parameter in stage.named_parameters():
            if part in name:
                parameter.view(-1)[-1] = INF


def checkpoint_with_inf(rank, config):
    trainer = make_trainer(rank, config)
    spoil_weight(trainer, "layers.2.mlp.experts.", [0])
    save(trainer, 3)


def nothing(_):
    pass


@pytest.mark.long
def test_a_resumed_run_with_a_weight_that_is_not_finite_names_it(tmp_path):
    config = settings(tmp_path, seq_len=16)
    run_ranks(1, checkpoint_with_inf, config)
    error = error_of(2, change(config, resume=str(tmp_path)), nothing)
    assert error == (
        "the validation loss before step 4 is nan: parameter layers.2.mlp.experts.gate_up is not finite "
        "(stage 1, rank 0)"
    )
    assert checkpoints(config) == ["step-000003"]


def buffers(trainer):
    (block,) = blocks(trainer, 2)
    block.register_buffer("mask", torch.tensor([0, -INF]))  # this one is valid
    block.register_buffer("number", torch.tensor(3))
    block.mlp.register_buffer("scale", torch.tensor([1, NAN], dtype=torch.float64))
    change_output(trainer, 1, "run_experts", nan)


def test_a_buffer_that_is_not_finite_is_named(tmp_path):
    error = error_of(1, settings(tmp_path, seq_len=16), buffers)
    assert error.endswith(" is nan: buffer layers.2.mlp.scale is not finite (stage 1, rank 0)")


def spoil_after_last_step(trainer):
    train_step = trainer.step

    def step(number):
        record = train_step(number)
        if number == trainer.config.steps - 1:
            spoil_weight(trainer, "layers.3.mlp.experts.down", [1])
        return record

    trainer.step = step


@pytest.mark.long
def test_a_validation_loss_that_is_nan_after_the_last_step_saves_nothing(tmp_path):
    config = settings(tmp_path, steps=3, seq_len=16, save_every=1, keep=1, pp=1, ep=2)
    error = error_of(2, config, spoil_after_last_step)
    assert error == (
        "the validation loss after step 3 is nan: parameter layers.3.mlp.experts.down is not finite (stage 1, rank 1); "
        f"this step is not saved: {ADVICE}"
    )
    assert checkpoints(config) == ["step-000002"]


def test_custom_experts_with_a_mistake_end_the_command(tmp_path, capfd):
    own = ["--experts", "tests.support.dividing_experts:DividingExperts"]
    with pytest.raises(SystemExit) as exit_:
        main([*map(str, ("--steps", 2, "--out", tmp_path, *SMALL)), "--device", "cpu", *own])
    assert exit_.value.code == 1
    assert capfd.readouterr().err == (
        "train.py: error: the validation loss before step 1 is nan: the first non-finite output is that of layer 1, "
        "segment mlp (stage 1, rank 0)\n"
    )


# ---- Training steps ----


def nan_from_step_3(x, trainer):
    return x * NAN if trainer.progress.step >= 3 and torch.is_grad_enabled() else x


class _NaNGradient(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.view_as(x)

    @staticmethod
    def backward(_, *grads):
        return grads[0] * NAN


def nan_gradient(x, _):
    return _NaNGradient.apply(x)


def weight_gradient(trainer, name, value):
    """Replace the gradient of a parameter by `value`."""
    for stage in trainer.stages.values():
        parameter = dict(stage.named_parameters()).get(name)
        if parameter is not None:
            parameter.register_hook(lambda grad: torch.full_like(grad, value))


NORM = "layers.0.attention_norm.weight"


@pytest.mark.parametrize("ranks,changes,spoil,found", [
    (2, {}, (change_output, 2, "run_experts", nan_from_step_3, [1]),
     "the first non-finite output is that of layer 2, segment mlp (stage 1, rank 1)"),
    (2, {"recompute": "full"}, (change_output, 1, "run_experts", nan_gradient),
     "the first non-finite input gradient is that of layer 1, segment mlp (stage 0, rank 0)"),
    (2, {"schedule": "zb1p", "overlap": False}, (change_output, 3, "attend_and_route", nan_gradient),
     "the first non-finite input gradient is that of layer 3, segment attn (stage 1, rank 1)"),
    (2, {}, (weight_gradient, NORM, NAN),
     f"the first non-finite gradient is that of parameter {NORM} (stage 0, rank 0)"),
    (2, {"pp": 1}, (weight_gradient, NORM, 1.5e38),
     f"all gradients are finite, but not the sum over ranks of that of {NORM} (stage 0, rank 0)"),
], ids=["output", "input gradient", "another schedule", "parameter", "sum over ranks"])  # fmt: skip
@pytest.mark.quick("output", "another schedule", "sum over ranks")
def test_too_many_skipped_steps_name_the_first_non_finite_value(tmp_path, ranks, changes, spoil, found):
    config = settings(tmp_path, steps=9, seq_len=16, max_skipped=2, save_every=1, keep=1, **changes)
    error = error_of(ranks, config, *spoil)
    assert error == f"2 consecutive steps had a non-finite loss or gradient: {found}; {STOPS}"
    assert checkpoints(config) == (["step-000002"] if nan_from_step_3 in spoil else [])


def test_a_run_that_skipped_all_its_steps(tmp_path):
    config = settings(tmp_path, steps=3, seq_len=16, save_every=1)
    error = error_of(2, config, change_output, 3, "attend_and_route", nan_gradient)
    found = "the first non-finite input gradient is that of layer 3, segment attn (stage 1, rank 0)"
    assert error == f"all steps of the run (3) had a non-finite loss or gradient: {found}; {STOPS}"
    assert checkpoints(config) == []


def test_the_loss_itself_is_not_finite(tmp_path):
    config = settings(tmp_path, seq_len=16)
    found = "all outputs are finite, but not the loss (stage 1, rank 0)"
    assert error_of(1, config, infinite_loss) == f"the validation loss before step 1 is inf: {found}"


def infinite_loss(trainer):
    last = trainer.stages[1]
    original = last.loss
    last.loss = lambda *arguments: original(*arguments) * INF


def mtp_nan(trainer):
    trainer.stages[1].mtp.get_submodule("0").block.mlp.run_shared = lambda _, x: x * NAN


def test_the_layers_of_multi_token_prediction_are_named(tmp_path):
    config = settings(tmp_path, steps=1, seq_len=16, model=dataclasses.replace(MODEL, mtp_layers=1))
    found = "the first non-finite output is that of layer 4, segment mlp (stage 1, rank 0)"
    assert error_of(1, config, mtp_nan).startswith(
        f"all steps of the run (1) had a non-finite loss or gradient: {found}; "
    )


def nan_in_steps(trainer, *steps):
    pipeline_step = trainer.pipeline.step
    pending = set(steps)

    def once(*batch, **options):
        losses = pipeline_step(*batch, **options)
        if torch.is_grad_enabled() and trainer.progress.step in pending:
            pending.remove(trainer.progress.step)
            losses[-1] = losses[-1] * NAN
        return losses

    trainer.pipeline.step = once


def test_a_value_that_was_not_finite_only_once(tmp_path):
    error = error_of(2, shallow_settings(tmp_path, steps=2, seq_len=16), nan_in_steps, 1, 2)
    again = "when the same batch was run again, all outputs and gradients were finite"
    assert error == f"all steps of the run (2) had a non-finite loss or gradient: {again}; {STOPS}"


# ---- Checkpoints after skipped steps ----


def run_with_nan(rank, config, stop_at, *steps):
    """The checkpoints during the run, after each step. stop_at: request a stop in this step."""
    trainer = make_trainer(rank, config)
    nan_in_steps(trainer, *steps)
    train_step, seen = trainer.step, []

    def train_and_look(step):
        seen.append(checkpoints(config)[:1])
        trainer.stop.requested = step + 1 == stop_at
        return train_step(step)

    trainer.step = train_and_look  # type: ignore[method-assign]
    train_loop(trainer)
    return seen


def test_a_checkpoint_that_is_due_after_a_skipped_step_waits_for_an_update(tmp_path):
    config = shallow_settings(tmp_path, steps=6, seq_len=16, save_every=2, save_async=False, keep=1)
    seen = run_ranks(1, run_with_nan, config, 0, 2, 3)[0]
    assert seen == [[], [], [], [], ["step-000004"], ["step-000004"]]
    assert checkpoints(config) == ["step-000006"]


def test_a_run_that_is_stopped_after_a_skipped_step_keeps_the_checkpoint_before_it(tmp_path):
    config = shallow_settings(tmp_path, steps=6, seq_len=16, save_every=2, keep=1)
    run_ranks(1, run_with_nan, config, 4, 4)
    assert checkpoints(config) == ["step-000004", "step-000002"]
