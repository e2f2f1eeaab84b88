"""Which checkpoint a run resumes from, and whether it holds the same model."""

import dataclasses

import pytest

from moe_dualpipe.checkpoint import check_model, find_checkpoint
from moe_dualpipe.models import ModelConfig
from tests.support.checkpoints import write_manifest


def test_find_returns_the_newest_complete_checkpoint(tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint in .*: give the folder of a run or of a checkpoint"):
        find_checkpoint(str(tmp_path))
    for step, complete in [(9, True), (20, True), (100, False), (200, None)]:
        folder = tmp_path / "checkpoints" / f"step-{step:06d}"
        write_manifest(folder)
        if complete is None:
            (folder / "tokens.txt").unlink()
        elif not complete:
            (folder / "run.json").unlink()
    assert find_checkpoint(str(tmp_path)).name == "step-000020"
    assert find_checkpoint(str(tmp_path / "checkpoints")).name == "step-000020"
    direct = tmp_path / "checkpoints" / "step-000009"
    assert find_checkpoint(str(direct)) == direct


def test_a_checkpoint_of_another_model_is_rejected(tmp_path):
    write_manifest(tmp_path, model={"hidden_size": 64})
    with pytest.raises(ValueError, match=r"holds another model: hidden_size was 64, now 128$"):
        check_model(tmp_path, ModelConfig())
    write_manifest(tmp_path, model={**dataclasses.asdict(ModelConfig()), "depth": 3})
    with pytest.raises(ValueError, match=r"holds another model: depth was 3, now 'unknown'$"):
        check_model(tmp_path, ModelConfig())
    (tmp_path / "run.json").write_text("not json")
    with pytest.raises(ValueError, match="cannot read"):
        check_model(tmp_path, ModelConfig())


def test_an_option_that_the_checkpoint_does_not_know_counts_as_its_default(tmp_path):
    older = dataclasses.asdict(ModelConfig())
    del older["rope_theta"]
    write_manifest(tmp_path, step=7, model=older)
    assert check_model(tmp_path, ModelConfig()) == 7
    with pytest.raises(ValueError, match=r"holds another model: rope_theta was 10000.0, now 500.0$"):
        check_model(tmp_path, ModelConfig(rope_theta=500.0))


def test_training_options_of_the_model_may_differ(tmp_path):
    model = {**dataclasses.asdict(ModelConfig()), "init_std": 0.5, "sequence_loss": 1e-4, "z_loss": 0, "mtp_weight": 1}
    write_manifest(tmp_path, step=7, model=model)
    assert check_model(tmp_path, ModelConfig()) == 7
