"""Predicted peak memory against what training steps allocate: weights, optimizer state, and the peak within a step."""

import dataclasses

import pytest

from moe_dualpipe.checkpoint import global_weights
from moe_dualpipe.models import ModelConfig, build_model
from moe_dualpipe.models.config import LoRA
from moe_dualpipe.training.config import OptimizerConfig
from moe_dualpipe.training.memory_check import step_memory
from tests.support.ranks import run_ranks
from tests.support.runs import change, make_trainer, peak_bytes, settings

MODEL = ModelConfig(
    hidden_size=64, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16, dense_size=192, expert_size=64,
    num_experts=4, experts_per_token=2, init_std=0.1,
)  # fmt: skip
KINDS = ["none", "norms", "attention", "full"]


def memory_of_a_rank(rank, configs):
    """Predicted bytes, and the bytes that this rank occupies at its peak, for each run."""
    found = []
    for config in configs:
        given = {"weights": global_weights(build_model(config.model))} if config.lora.rank else {}
        trainer = make_trainer(rank, config, **given)
        trainer.step(0)  # allocates what stays
        weights = {id(p): p.nbytes for stage in trainer.stages.values() for p in stage.parameters()}
        used = sum(weights.values()) + trainer.optimizer.state_bytes + peak_bytes(trainer.step, 1)[0]
        predicted = step_memory(trainer.config, trainer.run.choice, trainer.run.numerics.dtype, trainer.run.device)
        predicted = predicted[trainer.layout.pp_rank]
        found.append((predicted.total, used))
        del trainer
    return found


def check(tmp_path, num_ranks, *changes, model=MODEL):
    base = settings(
        tmp_path, model=model, seq_len=256, micro_batch_size=2, batch_size=8 * num_ranks, compile="off", pp=num_ranks
    )
    by_rank = run_ranks(num_ranks, memory_of_a_rank, [change(base, **each) for each in changes])
    for each, ranks in zip(changes, zip(*by_rank, strict=True), strict=True):
        most = max(used for _, used in ranks)
        assert max(predicted for predicted, _ in ranks) == pytest.approx(most, rel=0.05), each
        # The rank that needs the most decides whether a run fits. Ranks with both ends of the model are up to 6% high.
        for predicted, used in ranks:
            assert used / most - 0.05 < predicted / most < used / most + 0.10, each


def test_two_ranks_use_what_is_predicted(tmp_path):
    check(tmp_path, 2, {"schedule": "dualpipe", "recompute": "attention"})


LARGE = dataclasses.replace(MODEL, num_layers=2, hidden_size=256, expert_size=256, num_experts=8)


@pytest.mark.parametrize("model", [MODEL, LARGE], ids=["many rows", "large weights"])
@pytest.mark.quick("large weights")
def test_experts_in_fp8(tmp_path, model):
    check(tmp_path, 1, {"fp8": "experts"}, model=model)


def test_adapters(tmp_path):
    model = dataclasses.replace(MODEL, num_layers=3, hidden_size=192, expert_size=192)
    check(tmp_path, 1, {"lora": LoRA(4)}, {"lora": LoRA(4), "recompute": "full"}, model=model)


@pytest.mark.long
@pytest.mark.parametrize("recompute", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_and_recomputation(tmp_path, ranks, recompute):
    names = ["1f1b", "dualpipev"] + ["zb1p", "zbv", "dualpipe"] * (ranks > 1)
    model = MODEL if ranks < 4 else dataclasses.replace(MODEL, num_layers=8)
    check(tmp_path, ranks, *({"schedule": name, "recompute": recompute} for name in names), model=model)


def optimizer_of_a_rank(rank, configs):
    """Predicted and actual bytes of optimizer state, for each run."""
    trainers = [make_trainer(rank, config) for config in configs]
    needs = (step_memory(t.config, t.run.choice, t.run.numerics.dtype, t.run.device) for t in trainers)
    return [
        (need[t.layout.pp_rank].optimizer, t.optimizer.state_bytes) for need, t in zip(needs, trainers, strict=True)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_muon_has_two_moments_for_embedding_and_head(tmp_path, num_ranks):
    models = (dataclasses.replace(MODEL, vocab_size=4096, **other) for other in ({}, {"tied_embeddings": True}))
    optim = OptimizerConfig("muon")
    configs = [
        settings(tmp_path, model=model, pp=num_ranks, optim=optim, zero=zero)
        for model in models
        for zero in (True, False)
    ]
    for predicted in zip(*run_ranks(num_ranks, optimizer_of_a_rank, configs), strict=True):
        expected, actual = map(max, zip(*predicted, strict=True))
        assert expected == pytest.approx(actual, rel=0.02)
