"""Training runs: metrics, and equal results in every parallel layout and with options that save time or memory."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_dualpipe.data import BYTES
from moe_dualpipe.health.heartbeat import Progress
from moe_dualpipe.inference.sampling import Sampling
from moe_dualpipe.models import build_model, expert_loads
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.training import step
from moe_dualpipe.training.loop import train_loop
from moe_dualpipe.training.step import Trainer
from tests.support.ranks import run_ranks
from tests.support.runs import (
    MODEL,
    SHALLOW,
    change,
    introduction,
    losses,
    make_trainer,
    records,
    settings,
    train,
    train_each,
    without_clocks,
)


def test_training_reduces_the_loss_and_records_metrics(tmp_path):
    config = settings(tmp_path / "run", steps=40, peak_tflops=0.001)
    run = run_ranks(1, train, config)[0]
    before, after = losses(run, "validation_loss").values()
    assert after < before - 1.5
    record = run[20]
    assert {"step", "loss", "grad_norm", "lr", "tokens_per_s", "expert_load_max_over_mean"} <= set(record)
    assert record["tokens"] == 4 * 32
    flops = train_flops_per_token(SHALLOW, 32) * record["tokens_per_s"]
    assert record["mfu"] == pytest.approx(flops / 1e9, abs=1e-4)
    assert 1 <= record["expert_load_max_over_mean"] <= MODEL.num_experts / MODEL.experts_per_token
    assert 0 <= record["dead_experts"] < 1


@pytest.mark.long
def test_every_parallel_layout_and_schedule_trains_alike(tmp_path):
    """Losses are equal, and a checkpoint of one layout resumes in another."""
    four = {"model": MODEL, "steps": 4}  # DualPipeV and the interleaved schedule have four stages on two ranks
    divisions = {
        "dualpipe": {"save_every": 2},
        "chimera": {"schedule": "chimera"},
        "interleaved_1f1b": {"schedule": "interleaved_1f1b", "num_chunks": 2},
        "dualpipev": {"schedule": "dualpipev"},
    }
    runs = run_ranks(2, train_each, [settings(tmp_path / k, **four, **changes) for k, changes in divisions.items()])[0]
    checkpoint = str(tmp_path / "dualpipe" / "checkpoints" / "step-000002")
    alone = [settings(tmp_path / "one", **four), settings(tmp_path / "moved", **four, resume=checkpoint)]
    one, moved = run_ranks(1, train_each, alone)[0]
    reference = losses(one)
    for run, name in zip(runs, divisions, strict=True):
        assert losses(run) == pytest.approx(reference, rel=1e-5), name
    assert losses(moved) == pytest.approx({s: loss for s, loss in reference.items() if s > 2}, rel=1e-5)


CHOICES = [
    {"overlap": False},
    {"recompute": "norms"},
    {"recompute": "attention"},
    {"recompute": "full"},
    {"max_deferred": 1},
]


@pytest.mark.parametrize("ranks,division", [(1, {}), (2, {"pp": 2}), (2, {"pp": 1, "ep": 2})])
@pytest.mark.long
def test_overlap_recompute_and_deferral_are_bit_identical(tmp_path, ranks, division):
    small = {"steps": 2, "seq_len": 16, "eval_sequences": 1, **division}
    configs = [settings(tmp_path / str(i), **small, **choice) for i, choice in enumerate([{}, *CHOICES])]
    runs = list(map(without_clocks, run_ranks(ranks, train_each, configs)[0]))
    assert len(runs[0]) == 4
    for run, choice in zip(runs[1:], CHOICES, strict=True):
        assert run == runs[0], choice


@pytest.mark.parametrize("ranks,changes", [(1, {}), (2, {"pp": 1, "ep": 2})], ids=str)
@pytest.mark.quick("1-{}")
def test_a_fused_loss_trains_alike_and_its_checkpoints_resume_without_it(tmp_path, ranks, changes):
    model = dataclasses.replace(SHALLOW, vocab_size=1009)
    plain = settings(tmp_path / "plain", model=model, steps=4, **changes)
    fused = settings(tmp_path / "fused", model=model, steps=4, save_every=2, fused_loss=True, **changes)
    expected, seen = run_ranks(ranks, train_each, [plain, fused])[0]
    assert losses(seen) == pytest.approx(losses(expected), rel=1e-5)
    assert losses(seen, "grad_norm") == pytest.approx(losses(expected, "grad_norm"), rel=1e-4)
    assert losses(seen, "validation_loss") == pytest.approx(losses(expected, "validation_loss"), rel=1e-5)
    half = str(tmp_path / "fused" / "checkpoints" / "step-000002")
    rest = run_ranks(ranks, train, change(plain, out=str(tmp_path / "rest"), resume=half))[0]
    assert losses(rest) == pytest.approx({s: loss for s, loss in losses(seen).items() if s > 2}, rel=1e-5)


def fused_stages(rank, config):
    return [stage.options.fused_loss for stage in make_trainer(rank, config).stages.values()]


@pytest.mark.parametrize("fused_loss", [False, True])
def test_fused_loss_is_passed_to_the_stages(tmp_path, fused_loss):
    config = settings(tmp_path, fused_loss=fused_loss)
    assert run_ranks(1, fused_stages, config) == [[fused_loss] * 2]


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


@pytest.mark.parametrize("every,when,zero,recorded", [
    (None, 5, False, 6), (3, 1, False, 2), (3, 1, True, 2), (1, 1, True, 2), (3, 3, False, 5),
])  # fmt: skip
@pytest.mark.quick("None-5-False-6", "1-1-True-2", "3-3-False-5")
def test_replicas_that_differ_stop_the_run_at_the_next_check(tmp_path, every, when, zero, recorded):
    config = settings(tmp_path, pp=1, check_replicas_every=every, zero=zero)
    assert run_ranks(2, drifting_run, config, when)[0] == recorded


def bf16_step(rank, config):
    trainer = make_trainer(rank, config)
    trainer.step(0)
    assert {p.dtype for p in trainer.optimizer.parameters.values()} == {torch.bfloat16}
    assert {w.dtype for w in trainer.optimizer.master.values()} == {torch.float32}


def test_bf16_trains_with_fp32_master_weights(tmp_path):
    run_ranks(1, bf16_step, settings(tmp_path, dtype="bfloat16"))


@pytest.mark.parametrize("changes", [{}, {"ep": 2}, {"pp": 1}], ids=str)
def test_parameters_are_counted_once(tmp_path, changes):
    sizes = {name: p.numel() for name, p in build_model(SHALLOW).named_parameters()}
    total = sum(sizes.values())
    idle = sum(size for name, size in sizes.items() if ".experts." in name) / 2  # two of four experts a token
    printed, nothing = run_ranks(2, introduction, settings(tmp_path, **changes))
    assert f"{total / 1e6:.2f} M parameters, {(total - idle) / 1e6:.2f} M active" in printed
    assert (", experts over 2, on cpu in float32\n" in printed) == ("ep" in changes)
    assert nothing == ""


def loads_by_layer(rank, config):
    trainer = make_trainer(rank, config)
    batch = trainer.run.text.batch(0, 0, 4, config.batch.seq_len)
    trainer.pipeline.step(*batch)
    model = build_model(MODEL)
    model(batch[0])
    assert torch.equal(trainer.balance.loads(trainer.device), expert_loads(model))


@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipev"])
def test_expert_loads_are_counted_per_layer(tmp_path, schedule):
    run_ranks(2, loads_by_layer, settings(tmp_path, model=MODEL, schedule=schedule))


def test_the_sample_uses_the_seed_and_the_sampling_options(tmp_path, monkeypatch):
    passed = []
    generate = lambda *args: passed.extend(args[-2:]) or torch.tensor([[72, 105]])  # noqa: E731
    monkeypatch.setattr(step, "generate_through_pipeline", generate)
    trainer: Any = object.__new__(Trainer)
    trainer.config, trainer.progress = settings(tmp_path, seed=5), Progress()
    trainer.pipeline = None
    trainer.text = SimpleNamespace(tokenizer=BYTES)
    assert trainer.sample() == "Hi"
    assert passed == [Sampling(0.8, None, 1.0), 5]
