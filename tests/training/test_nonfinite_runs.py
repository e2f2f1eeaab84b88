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
STOPS = f"the run stops without a checkpoint: {ADVICE}"


def settings(out, **changes):
    """With two layers a stage: the first of them that is not finite is named, not the one after it."""
    return shallow_settings(out, **{"model": MODEL, **changes})


def failing_runs(rank, runs):
    """Do runs after `spoil(trainer, ...)`, which must fail. Returns what each prints on stderr."""
    texts = []
    for config, spoil, *arguments in runs:
        trainer = make_trainer(rank, config)
        spoil(trainer, *arguments)
        printed = io.StringIO()
        with contextlib.redirect_stderr(printed), pytest.raises(SystemExit) as exit_:
            train_loop(trainer)
        assert exit_.value.code == 1
        texts.append(printed.getvalue())
    return texts


def errors_of(runs):
    """The errors of failing runs: the last line on rank 0. The other ranks print nothing."""
    first, *others = run_ranks(2, failing_runs, runs)
    assert all(text == "" for texts in others for text in texts)
    return [text.splitlines()[-1].removeprefix("train.py: error: ") for text in first]


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


# ---- How a run is spoiled ----


@torch.no_grad()
def spoil_weight(trainer, part, ranks):
    for stage in trainer.stages.values() if trainer.layout.rank in ranks else ():
        for name, parameter in stage.named_parameters():
            if part in name:
                parameter.view(-1)[-1] = INF


def spoil_after_last_step(trainer):
    train_step = trainer.step

    def step(number):
        record = train_step(number)
        if number == trainer.config.steps - 1:
            spoil_weight(trainer, "layers.3.mlp.experts.down", [1])
        return record

    trainer.step = step


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


NORM = "layers.0.attention_norm.weight"
VALIDATION = "the validation loss before step 1 is nan: "
TWO = "2 consecutive steps had a non-finite loss or gradient: "
ALL = "all steps of the run (2) had a non-finite loss or gradient: "
OUTPUT, GRADIENT = (f"the first non-finite {what} is that of " for what in ("output", "input gradient"))
# Options, how the run is spoiled, the error, and the newest checkpoint.
PLACES = [
    ({}, (change_output, 3, "attend_and_route", nan, [1]),
     f"{VALIDATION}{OUTPUT}layer 3, segment attn (stage 1, rank 1)"),
    ({"pp": 1, "ep": 2}, (change_output, 1, "run_experts", nan, [1]),
     f"{VALIDATION}{OUTPUT}layer 1, segment mlp (stage 0, rank 1)"),
    ({}, (change_output, 2, "run_experts", nan_from_step_3, [1]),
     f"{TWO}{OUTPUT}layer 2, segment mlp (stage 1, rank 1); {STOPS}", "step-000002"),
    ({"recompute": "full"}, (change_output, 1, "run_experts", nan_gradient),
     f"{TWO}{GRADIENT}layer 1, segment mlp (stage 0, rank 0); {STOPS}"),
    ({}, (weight_gradient, NORM, NAN),
     f"{TWO}the first non-finite gradient is that of parameter {NORM} (stage 0, rank 0); {STOPS}"),
    ({"pp": 1}, (weight_gradient, NORM, 1.5e38),
     f"{TWO}all gradients are finite, but not the sum over ranks of that of {NORM} (stage 0, rank 0); {STOPS}"),
    ({"pp": 1, "ep": 2, "steps": 3}, (spoil_after_last_step,),
     "the validation loss after step 3 is nan: parameter layers.3.mlp.experts.down is not finite (stage 1, rank 1); "
     f"this step is not saved: {ADVICE}", "step-000002"),
    ({"steps": 2, "max_skipped": 9}, (nan_in_steps, 1, 2),
     f"{ALL}when the same batch was run again, all outputs and gradients were finite; {STOPS}"),
]  # fmt: skip


def test_the_error_names_the_first_value_that_is_not_finite(tmp_path):
    common = {"steps": 9, "seq_len": 16, "eval_sequences": 1, "max_skipped": 2, "save_every": 1, "keep": 1}
    cases = [(settings(tmp_path / str(i), **{**common, **changes}), *rest) for i, (changes, *rest) in enumerate(PLACES)]
    found = errors_of([(config, *spoil) for config, spoil, *_ in cases])
    for error, (config, spoil, expected, *newest) in zip(found, cases, strict=True):
        assert error == expected, spoil
        assert checkpoints(config) == newest, spoil


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
    config = shallow_settings(tmp_path, steps=6, seq_len=16, save_every=3, save_async=False, keep=1)
    seen = run_ranks(1, run_with_nan, config, 0, 2, 3)[0]
    assert seen == [[], [], [], [], ["step-000004"], ["step-000004"]]
    assert checkpoints(config) == ["step-000006"]


def test_a_run_that_is_stopped_after_a_skipped_step_keeps_the_checkpoint_before_it(tmp_path):
    config = shallow_settings(tmp_path, steps=6, seq_len=16, save_every=2, keep=1)
    run_ranks(1, run_with_nan, config, 4, 4)
    assert checkpoints(config) == ["step-000004", "step-000002"]
