"""Training with checkpoints: background saves, full disks, and resuming with another parallel layout."""

import contextlib
import dataclasses
import io

import pytest

from moe_dualpipe.checkpoint import save as save_module
from moe_dualpipe.checkpoint import verify_checkpoint
from moe_dualpipe.training.loop import train_loop
from tests.support.checkpoints import FullDisk, checkpoint_names
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, losses, make_trainer, records, settings, train, train_each

SMALL = {"steps": 3, "seq_len": 8, "eval_sequences": 1, "save_every": 1}


def test_background_saves_are_bit_identical_to_synchronous_ones(tmp_path):
    configs = [settings(tmp_path / str(on), save_async=on, keep=2, **SMALL) for on in (True, False)]
    runs = run_ranks(2, train_each, configs)[0]
    assert losses(runs[0]) == losses(runs[1])
    for step in (2, 3):
        one, other = (
            verify_checkpoint(tmp_path / str(on) / "checkpoints" / f"step-{step:06d}") for on in (True, False)
        )
        assert one.files == other.files != {}
    assert checkpoint_names(tmp_path / "True") == ["step-000002", "step-000003"]


def train_on_a_disk_that_fills(rank, runs):
    """Make saves fail on rank 1 at the given steps. Returns the exit code, checkpoints and error lines of each run."""
    ends = []
    for config, full_at in runs:
        trainer, code = make_trainer(rank, config), 0
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()) as err:
            disk, save = FullDisk(patch), save_module.save_checkpoint

            def fail_at(run, step, *arguments, disk=disk, save=save, full_at=full_at):
                disk.room = 100 if rank == 1 and step in full_at else 10**9
                return save(run, step, *arguments)

            patch.setattr(save_module, "save_checkpoint", fail_at)
            try:
                train_loop(trainer)
            except SystemExit as exit_:
                code = exit_.code
        messages = [line for line in err.getvalue().splitlines() if line.startswith("train.py: error: ")]
        ends.append((code, checkpoint_names(config.checkpoint.out), messages))
    return ends


def test_training_continues_on_a_full_disk_and_exits_with_1_if_the_last_save_failed(tmp_path):
    reason = "rank 1: [Errno 28] No space left on device"
    failing = [[2], [1, 3]]
    configs = [settings(tmp_path / str(full_at), pp=1, **SMALL) for full_at in failing]
    ends = run_ranks(2, train_on_a_disk_that_fills, list(zip(configs, failing, strict=True)))
    for config, full_at, (code, left, messages), (code1, _, errors1) in zip(configs, failing, *ends, strict=True):
        assert code == code1 == (1 if 3 in full_at else 0)
        assert left == [f"step-00000{step}" for step in (1, 2, 3) if step not in full_at]
        folder = f"{config.checkpoint.out}/checkpoints"
        assert messages == [f"train.py: error: {folder}/step-00000{i} could not be written: {reason}" for i in full_at]
        assert errors1 == []
        assert list(losses(records(config.checkpoint.out))) == [1, 2, 3]
        assert losses(records(config.checkpoint.out), "save_error") == dict.fromkeys(full_at, reason)


# ---- Resuming with another parallel layout ----


LONG = {"model": MODEL, "steps": 10, "seq_len": 16, "eval_sequences": 1}


@pytest.mark.long
@pytest.mark.parametrize("ranks,layout", [(4, {"schedule": "1f1b"}), (1, {"schedule": "dualpipev"})], ids=str)
def test_a_pipeline_resumes_with_other_numbers_of_ranks_and_schedules(tmp_path, ranks, layout):
    whole = losses(run_ranks(2, train, settings(tmp_path / "whole", save_every=2, keep=None, **LONG))[0])
    resume = str(tmp_path / "whole" / "checkpoints" / "step-000002")
    found = losses(run_ranks(ranks, train, settings(tmp_path / "other", resume=resume, **layout, **LONG))[0])
    assert (
        found == pytest.approx({step: loss for step, loss in whole.items() if step > 2}, rel=1e-5) and len(found) == 8
    )


@pytest.mark.long
def test_resuming_changes_the_number_of_expert_parallel_ranks(tmp_path):
    """From --ep 1 to 2 and back. Two data-parallel ranks throughout, so that every step sees the same tokens."""
    common = {**LONG, "model": dataclasses.replace(MODEL, num_layers=2), "pp": 1, "keep": None}
    layouts = [{"ep": 1, "save_every": 2}, {"ep": 2, "save_every": 4}, {"ep": 1}]
    folder = "{}/{}/checkpoints/step-0000{}".format
    resumes = ["", folder(tmp_path, 0, "02"), folder(tmp_path, 1, "04")]
    configs = [
        settings(tmp_path / str(i), resume=resume, **common, **layout)
        for i, (layout, resume) in enumerate(zip(layouts, resumes, strict=True))
    ]
    ep1, ep2, ep1_again = (losses(run) for run in run_ranks(2, train_each, configs)[0])
    assert (len(ep2), len(ep1_again)) == (8, 6)
    assert ep2 == pytest.approx({step: loss for step, loss in ep1.items() if step > 2}, rel=1e-5)
    assert ep1_again == pytest.approx({step: loss for step, loss in ep1.items() if step > 4}, rel=1e-5)
