"""A loss or gradients that are not finite: all ranks skip the step, and the end of a run names the place."""

import contextlib
import io
import math
from pathlib import Path

import pytest
import torch

from moe_dualpipe.checkpoint import list_checkpoints
from moe_dualpipe.runtime.replicas import check_equal
from moe_dualpipe.training.extensions import Update
from moe_dualpipe.training.extensions.skipped_steps import SkippedSteps
from moe_dualpipe.training.loop import train_loop
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, make_trainer, settings

NAN, INF = float("nan"), float("inf")
ADVICE = "resume from an earlier one with a lower --lr, or check the data"
STOPS = f"the run stops without a checkpoint: {ADVICE}"


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


def change_output(trainer, layer, method, changed, ranks=None):
    """On some ranks, apply `changed(output, trainer)` to the first output of a method of a block or of its MLP."""
    stages = trainer.stages.values() if ranks is None or trainer.layout.rank in ranks else ()
    for block in [stage.layers[str(layer)] for stage in stages if str(layer) in stage.layers]:
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


def spoil_after_last_step(trainer):
    train_step = trainer.step

    def step(number):
        record = train_step(number)
        if number == trainer.config.steps - 1 and trainer.layout.rank == 1:
            trainer.stages[1].get_parameter("layers.3.mlp.experts.down").data.view(-1)[-1] = INF
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


def poison(trainer, rank, kind, value, *steps):
    """Once in each of `steps`, put `value` into the last loss of a rank, or into one element of one gradient."""
    pipeline_step, pending = trainer.pipeline.step, {*steps}

    def step(*batch, sum_gradients=False, num_labels=None):
        poisoned = trainer.progress.step in pending and torch.is_grad_enabled()
        losses = pipeline_step(*batch, sum_gradients=sum_gradients and not poisoned, num_labels=num_labels)
        pending.discard(trainer.progress.step if poisoned else None)
        if poisoned and trainer.layout.rank == rank:
            if kind == "loss":
                losses[-1] = torch.full_like(losses[-1], value)
            else:
                chosen = next(p for n, p in sorted(trainer.optimizer.parameters.items()) if kind in n)
                chosen.grad.view(-1)[-1] = value
        return losses

    trainer.pipeline.step = step


NORM = "layers.0.attention_norm.weight"
VALIDATION = "the validation loss before step 1 is nan: "
TWO = "2 consecutive steps had a non-finite loss or gradient: "
ALL = "all steps of the run (2) had a non-finite loss or gradient: "
OUTPUT, GRADIENT = (f"the first non-finite {what} is that of " for what in ("output", "input gradient"))
# Options, how the run is spoiled, the error, and the newest checkpoint.
PLACES = [
    ({}, (change_output, 3, "route", nan, [1]),
     f"{VALIDATION}{OUTPUT}layer 3, segment attn (stage 1, rank 1)"),
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
    ({"steps": 2, "max_skipped": 9}, (poison, 0, "loss", NAN, 1, 2),
     f"{ALL}when the same batch was run again, all outputs and gradients were finite; {STOPS}"),
]  # fmt: skip


def test_the_error_names_the_first_value_that_is_not_finite(tmp_path):
    """With two layers a stage: the first of them that is not finite is named, not the one after it."""
    common = {
        "model": MODEL,
        "steps": 9,
        "seq_len": 16,
        "eval_sequences": 1,
        "max_skipped": 2,
        "save_every": 1,
        "keep": 1,
    }
    cases = [(settings(tmp_path / str(i), **{**common, **changes}), *rest) for i, (changes, *rest) in enumerate(PLACES)]
    found = errors_of([(config, *spoil) for config, spoil, *_ in cases])
    for error, (config, spoil, expected, *newest) in zip(found, cases, strict=True):
        assert error == expected, spoil
        assert checkpoints(config) == newest, spoil


# ---- Checkpoints after skipped steps ----


def run_with_nan(rank, config, stop_at, *steps):
    """The checkpoints during the run, after each step. stop_at: request a stop in this step."""
    trainer = make_trainer(rank, config)
    poison(trainer, 0, "loss", NAN, *steps)
    train_step, seen = trainer.step, []

    def train_and_look(step):
        seen.append(checkpoints(config)[:1])
        trainer.stop.requested = step + 1 == stop_at
        return train_step(step)

    trainer.step = train_and_look  # type: ignore[method-assign]
    train_loop(trainer)
    return seen


def test_a_checkpoint_that_is_due_after_a_skipped_step_waits_for_an_update(tmp_path):
    config = settings(tmp_path, steps=6, seq_len=16, save_every=3, save_async=False, keep=1)
    seen = run_ranks(1, run_with_nan, config, 0, 2, 3)[0]
    assert seen == [[], [], [], [], ["step-000004"], ["step-000004"]]
    assert checkpoints(config) == ["step-000006"]


def test_a_run_that_is_stopped_after_a_skipped_step_keeps_the_checkpoint_before_it(tmp_path):
    config = settings(tmp_path, steps=6, seq_len=16, save_every=2, keep=1)
    run_ranks(1, run_with_nan, config, 4, 4)
    assert checkpoints(config) == ["step-000004", "step-000002"]


# ---- Skipped steps: on all ranks, whichever has the loss or gradient, and nothing changes ----


def snapshot(trainer):
    steps = [state["step"] for state in trainer.optimizer.adamw.state.values() if "step" in state]
    return [t.clone() for name, t in trainer.state().items() if name != "skipped"] + [s.clone() for s in steps]


def skipped_steps(rank, config, cases):
    """For each case: whether the recorded loss and gradient norm of the skipped step are NaN."""
    seen = []
    for changes, *how in cases:
        trainer = make_trainer(rank, change(config, **changes))
        poison(trainer, *how, 2)
        trainer.step(0)
        before = snapshot(trainer)
        record = trainer.step(1).record
        assert record["skipped"] == 1
        assert all(torch.equal(a, b) for a, b in zip(before, snapshot(trainer), strict=True))
        assert trainer.step(2).record["skipped"] == 1
        assert not any(torch.equal(a, b) for a, b in zip(before, snapshot(trainer), strict=True) if a.ndim > 1)
        for replicas in trainer.replicas:
            check_equal(replicas)
        assert all(torch.isfinite(t).all() for t in snapshot(trainer))
        seen.append((math.isnan(record["loss"]), math.isnan(record["grad_norm"])))
    return seen


def test_all_ranks_skip_a_step_that_is_not_finite_on_one(tmp_path):
    cases = [
        ({"pp": 1}, 1, "loss", NAN), ({"schedule": "dualpipe"}, 0, "head", -INF),
        ({"pp": 1, "ep": 2}, 1, ".experts.", NAN),
    ]  # fmt: skip
    seen = run_ranks(2, skipped_steps, settings(tmp_path, seq_len=16), cases)
    assert seen == [[(True, False), (False, False), (False, True)]] * 2


def finite(skips, step, loss, norm):
    update = Update(step - 1, loss, norm, torch.zeros(1, 2))
    skips.before_update(update)
    return update.finite


def test_messages_about_skipped_steps(capfd):
    skips, quiet = SkippedSteps(2), SkippedSteps(2, announce=False)
    for each in (skips, quiet):
        assert not finite(each, 3, NAN, 1.5)
        assert finite(each, 4, 2.0, 1.0)
        assert not finite(each, 5, 2.0, INF)
        assert not each.too_many
        assert not finite(each, 6, 2.0, NAN)
        assert each.too_many
        assert each.total == 3
    first, second, third = capfd.readouterr().err.splitlines()
    assert first == "train.py: step 3 is skipped: its loss is nan, its gradient norm 1.5 (1 so far)"
    assert second == "train.py: step 5 is skipped: its loss is 2.0, its gradient norm inf (2 so far)"
    assert third.endswith("(3 so far)")
