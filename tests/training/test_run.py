"""Training runs: metrics, and equal results in every parallel layout and with options that save time or memory."""

import dataclasses

import pytest
import torch

from moe_dualpipe.models import build_model
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.training.loop import train_loop
from tests.support.ranks import run_ranks
from tests.support.runs import (
    MODEL,
    SHALLOW,
    introduction,
    losses,
    make_trainer,
    records,
    settings,
    train,
)

MTP = dataclasses.replace(SHALLOW, mtp_layers=1)


def test_training_reduces_the_loss_and_records_metrics(tmp_path):
    config = settings(tmp_path / "run", steps=20, peak_tflops=0.001)
    run = run_ranks(1, train, config)[0]
    before, after = losses(run, "validation_loss").values()
    assert after < before - 1
    record = run[10]
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_s", "expert_load_max_over_mean"} <= set(record)
    assert record["tokens"] == 4 * 32
    flops = train_flops_per_token(SHALLOW, 32) * record["tokens_per_s"]
    assert record["mfu"] == pytest.approx(flops / 1e9, abs=1e-4)
    assert 1 <= record["expert_load_max_over_mean"] <= MODEL.num_experts / MODEL.experts_per_token
    assert 0 <= record["dead_experts"] < 1


def drifting_run(rank, config, when):
    trainer = make_trainer(rank, config)
    train_step = trainer.step

    def drift(step):
        record = train_step(step)
        trainer.optimizer.wait()
        if step == when and rank:
            with torch.no_grad():
                next(iter(trainer.optimizer.parameters.values())).view(-1)[0] += 1
        return record

    trainer.step = drift  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="must stay bit-equal"):
        train_loop(trainer)
    return len(losses(records(config.checkpoint.out)))


@pytest.mark.parametrize("changes,when,recorded", [
    ({"check_replicas_every": None}, 5, 6), ({"check_replicas_every": None, "save_every": 2}, 1, 2),
    ({"check_replicas_every": 3}, 3, 5), ({"check_replicas_every": 1, "zero": True}, 1, 2),
], ids=["end", "save", "third", "each"])  # fmt: skip
@pytest.mark.quick("save", "third")
def test_replicas_that_differ_stop_the_run_at_the_next_check(tmp_path, changes, when, recorded):
    config = settings(tmp_path, **{"pp": 1, "zero": False, "seq_len": 16, **changes})
    assert run_ranks(2, drifting_run, config, when)[0] == recorded


@pytest.mark.parametrize("changes", [{"model": MTP, "schedule": "1f1b"}, {"ep": 2}, {"pp": 1}], ids=["mtp", "ep", "dp"])
def test_parameters_are_counted_once(tmp_path, changes):
    """Also if two ranks hold the embedding, as with MTP."""
    sizes = {name: p.numel() for name, p in build_model(changes.get("model", SHALLOW)).named_parameters()}
    total = sum(sizes.values())
    idle = sum(size for name, size in sizes.items() if ".experts." in name) / 2  # two of four experts a token
    printed, nothing = run_ranks(2, introduction, settings(tmp_path, **changes))
    assert f"{total / 1e6:.2f} M parameters, {(total - idle) / 1e6:.2f} M active" in printed
    assert (", experts over 2, on cpu in float32\n" in printed) == ("ep" in changes)
    assert nothing == ""
