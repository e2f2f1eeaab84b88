"""A non-finite loss or gradient on any rank: all ranks skip the step, which changes nothing."""

import math

import torch

from moe_dualpipe.runtime.replicas import check_equal
from moe_dualpipe.training.extensions import Update
from moe_dualpipe.training.extensions.skipped_steps import SkippedSteps
from tests.support.ranks import run_ranks
from tests.support.runs import change, make_trainer, settings


def poison(trainer, rank, kind, value, steps):
    """In `steps`, put `value` into the loss of one rank, or into one element of one gradient."""
    pipeline_step = trainer.pipeline.step

    def step(inputs, labels, sum_gradients=False, num_labels=None):
        found = pipeline_step(inputs, labels, sum_gradients and trainer.progress.step not in steps, num_labels)
        if torch.is_grad_enabled() and trainer.progress.step in steps and trainer.layout.rank == rank:
            if kind == "loss":
                assert found, "this rank has no loss to poison"
                found[-1] = torch.full_like(found[-1], value)
            else:
                chosen = next(p for n, p in sorted(trainer.optimizer.parameters.items()) if kind in n)
                assert chosen.grad is not None
                chosen.grad.view(-1)[-1] = value
        return found

    trainer.pipeline.step = step


def snapshot(trainer):
    steps = [state["step"] for state in trainer.optimizer.adamw.state.values() if "step" in state]
    return [t.clone() for name, t in trainer.state().items() if name != "skipped"] + [s.clone() for s in steps]


def skipped_steps(rank, config, cases):
    """For each case: whether the recorded loss and gradient norm of the skipped step are NaN."""
    seen = []
    for changes, *how in cases:
        trainer = make_trainer(rank, change(config, **changes))
        poison(trainer, *how, steps={2})
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


NAN, INF = float("nan"), float("inf")


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
