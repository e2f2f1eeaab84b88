"""Runs whose loss or gradients are not finite: they end with an error that names the place, and save nothing of it."""

import contextlib
import io
from pathlib import Path

import pytest
import torch

from moe_dualpipe.checkpoint import list_checkpoints
from moe_dualpipe.training.loop import train_loop
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, make_trainer
from tests.support.runs import settings as shallow_settings

NAN, INF = float("nan"), float("inf")
ADVICE = "resume from an earlier one with a lower --lr, or check the data"


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


def nan(x, _):
    return x * NAN


# ---- The validation loss ----


@torch.no_grad()
def spoil_weight(trainer, part, ranks):
    for stage in trainer.stages.values() if trainer.layout.rank in ranks else ():
        for name, parameter in stage.named_parameters():
            if part in name:
                parameter.view(-1)[-1] = INF


def nothing(_):
    pass


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


# ---- Training steps ----


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
