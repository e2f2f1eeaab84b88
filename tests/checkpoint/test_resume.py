"""Training with checkpoints: background saves, and resuming with another parallel layout."""

import dataclasses

import pytest

from moe_dualpipe.checkpoint import verify_checkpoint
from tests.support.checkpoints import checkpoint_names
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, losses, settings, train, train_each

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
