"""Runs with multi-token prediction (MTP): metrics, resuming, parameter counts, and equal results in every layout."""

import dataclasses

import pytest
import torch

from moe_dualpipe.models import build_model, expert_loads
from moe_dualpipe.runtime.replicas import differing
from tests.support.ranks import run_ranks
from tests.support.runs import (
    SHALLOW,
    introduction,
    losses,
    make_run,
    make_trainer,
    settings,
    train_each,
    without_clocks,
)

MTP = dataclasses.replace(SHALLOW, mtp_layers=1)


@pytest.mark.long
def test_the_mtp_loss_falls_and_is_not_part_of_the_loss(tmp_path):
    plain, ahead = settings(tmp_path / "plain", steps=1), settings(tmp_path / "ahead", model=MTP, steps=20)
    without, with_it = run_ranks(1, train_each, [plain, ahead])[0]
    assert losses(with_it)[1] == losses(without)[1]
    assert losses(with_it, "validation_loss")[0] == losses(without, "validation_loss")[0]
    assert losses(without, "mtp_loss") == {}
    mtp = losses(with_it, "mtp_loss")
    assert mtp[1] == pytest.approx(losses(with_it)[1], rel=0.05)  # before any training
    assert mtp[20] < mtp[1] - 1
    assert losses(with_it, "validation_loss")[20] < losses(with_it, "validation_loss")[0] - 1


@pytest.mark.long
def test_every_schedule_trains_alike_and_resumes_in_another_layout(tmp_path):
    """With 1f1b two ranks hold an embedding each; with dualpipe each rank holds both ends of the pipeline."""
    common = {"model": MTP, "steps": 4, "save_every": 2}
    names = ["1f1b", "dualpipe"]
    two = [settings(tmp_path / name, schedule=name, **common) for name in names]
    checkpoint = str(tmp_path / "1f1b" / "checkpoints" / "step-000002")
    again = settings(tmp_path / "again", schedule="1f1b", resume=checkpoint, **common)
    runs = run_ranks(2, train_each, [*two, again])[0]
    one, moved = run_ranks(
        1, train_each,
        [settings(tmp_path / "one", **common), settings(tmp_path / "moved", model=MTP, steps=4, resume=checkpoint)],
    )[0]  # fmt: skip
    for run, name in zip(runs, names, strict=False):
        for kind in ("loss", "mtp_loss", "grad_norm", "validation_loss"):
            assert losses(run, kind) == pytest.approx(losses(one, kind), rel=1e-4), (name, kind)
    rest = {step: loss for step, loss in losses(runs[0]).items() if step > 2}
    assert losses(runs[2]) == rest
    assert losses(runs[2], "mtp_loss").items() <= losses(runs[0], "mtp_loss").items()
    assert losses(moved) == pytest.approx(rest, rel=1e-5)


@pytest.mark.long
def test_overlap_and_recompute_are_bit_identical_with_expert_parallelism(tmp_path):
    model = dataclasses.replace(MTP, mtp_layers=2)
    small = {"model": model, "steps": 2, "seq_len": 16, "eval_sequences": 1, "pp": 1, "ep": 2}
    choices = [{}, {"overlap": False}, {"recompute": "full"}]
    configs = [settings(tmp_path / str(i), **small, **choice) for i, choice in enumerate(choices)]
    first, *others = run_ranks(2, train_each, configs)[0]
    assert len(losses(first, "mtp_loss")) == 2
    for run, choice in zip(others, choices[1:], strict=True):
        assert without_clocks(run) == without_clocks(first), choice


def accounts(rank, config):
    """Check the loads. Returns the introduction and the replicas that differ, before and after changing one."""
    printed = introduction(rank, config)
    trainer = make_trainer(rank, config)
    x_BS, y_BS = trainer.run.text.batch(0, 0, 4, config.batch.seq_len)
    trainer.pipeline.step(x_BS, y_BS)
    model = build_model(config.model)
    model.loss(model(x_BS), y_BS)
    assert torch.equal(trainer.balance.loads(trainer.device), expert_loads(model))
    names = [name for replicas in trainer.replicas for name in differing(replicas)]
    if rank:
        trainer.stages[1].embedding.weight.data[5, 3] += 1
    return printed, names, [name for replicas in trainer.replicas for name in differing(replicas)]


def test_an_embedding_on_two_ranks_is_counted_once_and_compared(tmp_path):
    config = settings(tmp_path, model=MTP, schedule="1f1b")
    (printed, *found), (_, *found_there) = run_ranks(2, accounts, config)
    sizes = {name: p.numel() for name, p in build_model(MTP).named_parameters()}
    assert f": {sum(sizes.values()) / 1e6:.2f} M parameters" in printed
    assert "+ head + 1 MTP module (" in printed
    assert found == found_there == [[], ["embedding.weight"]]


def one_step(rank, config):
    trainer = make_trainer(rank, config)
    first, last = trainer.stages[0], trainer.stages[1]
    assert first.embedding.weight is last.embedding.weight
    assert {p.dtype for p in last.mtp.parameters()} == {torch.bfloat16}
    record = trainer.step(0).record
    assert torch.equal(trainer.optimizer.master["embedding.weight"].bfloat16(), last.embedding.weight)
    return record


def test_the_shared_embedding_is_one_parameter_in_bf16(tmp_path):
    record = run_ranks(1, one_step, settings(tmp_path, model=MTP, dtype="bfloat16", fused_loss=True))[0]
    assert 0 < record["mtp_loss"] < 20


def test_mtp_needs_longer_sequences(tmp_path):
    config = settings(tmp_path, model=dataclasses.replace(SHALLOW, mtp_layers=32))
    with pytest.raises(ValueError, match=r"^model.mtp_layers 32 needs --seq-len 33 or more: got 32"):
        make_run(config)


def test_mtp_rejects_a_document_mask(tmp_path):
    config = settings(tmp_path, model=MTP, document_mask=True)
    with pytest.raises(ValueError, match=r"--document-mask needs model.mtp_layers 0: got 1"):
        make_run(config)
