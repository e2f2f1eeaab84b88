"""Frozen parameters (`requires_grad=False`) have no gradient and no optimizer state. They are saved and compared."""

import dataclasses

import pytest
import torch
from torch import nn

from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.weight_grads import WeightGrads
from moe_dualpipe.models import build_model
from moe_dualpipe.runtime.optimizer import Optimizer
from moe_dualpipe.runtime.replicas import ReplicaSet, sum_gradients
from moe_dualpipe.training.config import OptimizerConfig
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, make_trainer, settings
from tests.support.special_experts import LowRankExperts, named

LOW_RANK = dataclasses.replace(SHALLOW, experts=named(LowRankExperts))
ADAMW, MUON = (OptimizerConfig(name, lr=0.05, weight_decay=0.5, warmup_steps=0) for name in ("adamw", "muon"))
SMALL = {"model": LOW_RANK, "seq_len": 16, "eval_sequences": 1, "steps": 4, "optim": ADAMW}


def is_base(name):
    return name.rpartition(".experts.")[2].split(".")[0] in ("up", "down")


def low_rank_steps(rank, config):
    """Do two steps and check the parameters of this rank. Returns the names and the bytes of its state."""
    trainer = make_trainer(rank, config)
    parameters = {name: p for stage in trainer.stages.values() for name, p in stage.named_parameters()}
    frozen = {name for name in parameters if is_base(name)}
    assert frozen
    before = {name: p.detach().clone() for name, p in parameters.items()}
    assert all(torch.isfinite(torch.tensor(trainer.step(step).record["loss"])) for step in range(2))
    same = {name for name, p in parameters.items() if torch.equal(p, before[name])}
    assert same == frozen
    trainer.check_replicas()

    text = trainer.run.text
    trainer.pipeline.step(*text.batch(0, 2, 4, 16, trainer._own))
    for replicas in trainer.replicas:
        sum_gradients(replicas)
    assert {name for name, p in parameters.items() if p.grad is None} == frozen
    return [*trainer.optimizer.tensors()], trainer.optimizer.state_bytes, trainer.count_parameters()


@pytest.mark.parametrize("ranks,changes,kinds,bytes_each", [
    (2, {}, ("exp_avg", "exp_avg_sq"), 8),
    (2, {"pp": 1, "zero": False}, ("exp_avg", "exp_avg_sq"), 8),
    (2, {"pp": 1, "ep": 2, "dtype": "bfloat16"}, ("exp_avg", "exp_avg_sq"), 12),
    (2, {"optim": MUON, "dtype": "bfloat16"}, ("momentum",), None),
    (1, {"schedule": "zbv", "optim": MUON}, ("momentum",), None),
], ids=["adamw", "whole state", "ep", "muon", "one rank"])  # fmt: skip
@pytest.mark.quick("whole state", "ep")
def test_frozen_weights_do_not_change_and_have_no_state(tmp_path, ranks, changes, kinds, bytes_each):
    model = build_model(LOW_RANK)
    base = {name for name in global_weights(model) if is_base(name)}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    seen = run_ranks(ranks, low_rank_steps, settings(tmp_path, **{**SMALL, **changes}))
    copies = 1 if changes.get("zero", True) else ranks  # with ZeRO, every tensor has one owner
    names = [name for on_rank, _, _ in seen for name in on_rank]
    assert sorted(name for name in names if is_base(name)) == sorted([f"model.{name}" for name in base] * copies)
    low_rank = {kind for kind, _, rest in (name.partition(".") for name in names) if rest == "layers.1.mlp.experts.a.3"}
    assert low_rank == {"model", *kinds}
    if bytes_each:
        assert sum(size for _, size, _ in seen) == bytes_each * trained * copies
    for _, _, counts in seen:
        assert counts[2] == pytest.approx(trained)
        assert counts[0] + counts[1] == pytest.approx(sum(p.numel() for p in model.parameters()))


# ---- Errors ----


@pytest.mark.parametrize("frozen", [True, False])
def test_freezing_after_the_optimizer_was_built_is_an_error(frozen):
    parameters = {name: nn.Parameter(torch.ones(3, 2)) for name in ("a", "b")}
    parameters["b"].requires_grad_(not frozen)
    optimizer = Optimizer([ReplicaSet(parameters, None)], ADAMW)
    parameters["b"].requires_grad_(frozen)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        RuntimeError, match=r"^requires_grad of b changed after the optimizer was built: set it before$"
    ):
        optimizer.step(0.1, 1.0)


# ---- What else a frozen weight does not cost ----


def test_a_frozen_weight_defers_no_gradient_and_saves_no_input():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    w_OI, w_EOI = (nn.Parameter(torch.randn(*shape).bfloat16(), requires_grad=False) for shape in ((3, 4), (2, 3, 4)))
    x = torch.randn(5, 4, dtype=torch.bfloat16, requires_grad=True)
    weight_grads = WeightGrads()
    for y, w in (
        (linear(x, w_OI, weight_grads), w_OI),
        (grouped_linear(x, w_EOI, offsets, weight_grads, accumulate=True), w_EOI),
    ):
        saved = y.grad_fn.saved_tensors  # type: ignore[union-attr]
        assert any(t is w for t in saved)
        assert not any(t is x for t in saved)
        with weight_grads.defer_to("later"):
            y.sum().backward()
        assert not weight_grads.has_deferred("later")
        weight_grads.run_deferred("later")
        assert w.grad is None
    assert x.grad.any()
