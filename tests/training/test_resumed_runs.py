"""Runs resumed from a checkpoint: bit-identical results, other layouts, and what cannot be resumed."""

import dataclasses

import pytest

from tests.support.ranks import run_ranks
from tests.support.runs import (
    SHALLOW,
    change,
    losses,
    make_run,
    make_trainer,
    records,
    save,
    settings,
    train,
    train_and_listen,
)


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {}), (2, {"ep": 2})], ids=str)
@pytest.mark.quick("1-{}", "2-{'ep': 2}")
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(tmp_path, ranks, changes):
    whole = run_ranks(ranks, train, settings(tmp_path / "whole", steps=4, save_every=2, **changes))[0]
    assert list(losses(whole)) == [1, 2, 3, 4]
    saved = sorted(path.name for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert saved == ["step-000002", "step-000004"]
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-000002"
    rest = run_ranks(ranks, train, settings(tmp_path / "rest", steps=4, resume=str(checkpoint), **changes))[0]
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 2}
    assert losses(rest, "grad_norm") == {s: norm for s, norm in losses(whole, "grad_norm").items() if s > 2}
    assert losses(rest, "validation_loss")[4] == losses(whole, "validation_loss")[4]


def test_the_resume_command_of_a_run_that_was_resumed_in_the_middle_names_its_own_checkpoint(tmp_path):
    """The folder still holds a later checkpoint of the first run."""
    config = settings(tmp_path / "run", seq_len=16, steps=3, save_every=1)
    assert f" --resume {config.checkpoint.out} --steps 6\n" in run_ranks(1, train_and_listen, config)[0]
    first, second = (str(tmp_path / "run" / "checkpoints" / f"step-00000{step}") for step in (1, 2))
    assert f" --resume {second} --steps 4\n" in run_ranks(1, train_and_listen, change(config, steps=2, resume=first))[0]


@pytest.mark.long
def test_a_checkpoint_resumes_with_another_number_of_expert_parallel_ranks(tmp_path):
    spread = settings(tmp_path / "ep2", ep=2, steps=4, save_every=2)
    run_ranks(2, train, spread)
    checkpoint = str(tmp_path / "ep2" / "checkpoints" / "step-000002")
    # Both have two data-parallel ranks, hence the same batches.
    together = run_ranks(2, train, settings(tmp_path / "ep1", pp=1, ep=1, steps=4, resume=checkpoint))[0]
    expected = {step: loss for step, loss in losses(records(spread.checkpoint.out)).items() if step > 2}
    assert losses(together) == pytest.approx(expected, rel=1e-5)


def train_shared(rank, configs):
    return [train(rank, config) for config in configs]


def test_parameters_that_all_experts_share_do_not_depend_on_the_number_of_ranks(tmp_path):
    """They are replicas: their gradients are summed over all ranks, and their checkpoints resume with any --ep."""
    model = dataclasses.replace(SHALLOW, experts="tests.support.custom_experts:Stacked")
    together = settings(
        tmp_path / "1", model=model, pp=1, ep=1, steps=3, seq_len=16, save_every=2, check_replicas_every=1
    )
    spread = change(together, out=str(tmp_path / "2"), ep=2)
    rest = change(together, out=str(tmp_path / "rest"), resume=str(tmp_path / "2" / "checkpoints" / "step-000002"))
    runs = run_ranks(2, train_shared, [together, spread, rest])[0]
    for kind, rel in (("loss", 1e-6), ("validation_loss", 1e-6), ("grad_norm", 1e-5)):
        expected, same, end = (losses(run, kind) for run in runs)
        assert same == pytest.approx(expected, rel=rel) and len(expected) > 1
        assert end[3] == pytest.approx(expected[3], rel=rel)


def save_twice(rank, config):
    trainer = make_trainer(rank, config)
    first = save(trainer, 3)
    trainer.step(0)
    assert save(trainer, 3) == first
    return [path.name for path in first.parent.iterdir()]


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path):
    assert run_ranks(1, save_twice, settings(tmp_path)) == [["step-000003"]]


def test_resuming_drops_the_metrics_of_steps_that_it_repeats(tmp_path):
    config = settings(tmp_path / "a", steps=4, save_every=2)
    run_ranks(1, train, config)
    checkpoint = str(tmp_path / "a" / "checkpoints" / "step-000002")
    before = records(config.checkpoint.out)
    with (tmp_path / "a" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # a line that a killed process did not finish
    after = run_ranks(1, train, change(config, resume=checkpoint))[0]
    assert [record["step"] for record in after if "loss" in record] == [1, 2, 3, 4]
    assert losses(after) == losses(before)


def test_resuming_rejects_a_finished_run_and_a_broken_checkpoint(tmp_path):
    run_ranks(1, train, settings(tmp_path, steps=1))
    with pytest.raises(ValueError, match="is already at step 1: use a larger --steps"):
        make_run(settings(tmp_path, steps=1, resume=str(tmp_path)))
    (tmp_path / "checkpoints" / "step-000001" / "rank-0-0.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=r"step-000001: rank-0-0.safetensors has 0 bytes, expected [\d,]+"):
        make_run(settings(tmp_path, resume=str(tmp_path)))


def test_resuming_rejects_a_checkpoint_without_one_of_its_files(tmp_path):
    run_ranks(1, train, settings(tmp_path / "a", steps=1))
    checkpoint = tmp_path / "a" / "checkpoints" / "step-000001"
    for path in checkpoint.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"step-000001 is broken: rank-0-0.safetensors is missing"):
        make_run(settings(tmp_path / "b", resume=str(checkpoint)))


def test_resuming_rejects_an_invalid_line_in_the_metrics(tmp_path):
    run_ranks(1, train, settings(tmp_path, steps=1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("oops\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 4: not a record with a step: 'oops'"):
        make_run(settings(tmp_path, resume=str(tmp_path)))
