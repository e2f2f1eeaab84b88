"""Frozen parameters (`requires_grad=False`) have no gradient and no optimizer state. They are saved and compared."""

import dataclasses
import re

import pytest
import torch
from torch import nn

from moe_dualpipe.checkpoint import find_checkpoint, load_model
from moe_dualpipe.checkpoint.weights import global_weights
from moe_dualpipe.cli import main
from moe_dualpipe.kernels.grouped_gemm import grouped_linear
from moe_dualpipe.kernels.linear import linear
from moe_dualpipe.kernels.weight_grads import WeightGrads
from moe_dualpipe.models import build_model
from moe_dualpipe.runtime.optimizer import Optimizer
from moe_dualpipe.runtime.replicas import ReplicaSet, sum_gradients
from moe_dualpipe.schedule import build
from moe_dualpipe.tools.planner import MicroBatch, peak_memory
from moe_dualpipe.training.config import OptimizerConfig
from moe_dualpipe.training.loop import train_loop
from tests.support.frozen import Freezer
from tests.support.ranks import run_ranks
from tests.support.runs import SHALLOW, change, introduction, losses, make_trainer, settings, train
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
], ids=str)  # fmt: skip
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


# ---- Checkpoints and exports ----


def stop_and_resume(rank, first, second):
    """Train `first`, then `second` from its checkpoint after one step. Returns the losses of both."""
    runs = train(rank, change(first, save_every=1))
    half = f"{first.checkpoint.out}/checkpoints/step-000001"
    return losses(runs), losses(train(rank, change(second, resume=half)))


def saved_weights(run, experts=LOW_RANK.experts):
    return global_weights(load_model(find_checkpoint(str(run)), experts))


@pytest.mark.long
def test_frozen_weights_are_saved_and_a_resumed_run_is_bit_identical(tmp_path):
    first = settings(tmp_path / "first", **{**SMALL, "steps": 2}, dtype="bfloat16", pp=1)
    whole, rest = run_ranks(2, stop_and_resume, first, change(first, out=str(tmp_path / "rest")))[0]
    assert rest == {2: whole[2]}
    weights = global_weights(build_model(LOW_RANK)).items()
    fresh = {name: weight.bfloat16().float() for name, weight in weights if is_base(name)}
    assert len(fresh) == 2 * SHALLOW.num_experts
    for run in ("first", "rest"):
        saved = saved_weights(tmp_path / run)
        assert all(torch.equal(saved[name], weight) for name, weight in fresh.items()), run

    given = str(tmp_path / "given")
    assert main(["export", str(tmp_path / "first"), "--out", given, "--experts", LOW_RANK.experts]) == 0
    started = settings(tmp_path / "started", **{**SMALL, "steps": 1}, seed=5, weights=given, ep=2)
    run_ranks(2, train, started)
    saved = saved_weights(tmp_path / "started")
    assert all(torch.equal(saved[name], weight) for name, weight in fresh.items())


def freeze_and_resume(rank, config, pattern):
    with pytest.MonkeyPatch.context() as patch:
        Freezer(patch, pattern)
        trainer = make_trainer(rank, config)
        parameters = {name: p for stage in trainer.stages.values() for name, p in stage.named_parameters()}
        before = {name: p.detach().clone() for name, p in parameters.items() if re.search(pattern, name)}
        train_loop(trainer)
    assert before
    assert all(torch.equal(p, parameters[name]) for name, p in before.items())


def resume_error(rank, config):
    with pytest.raises(ValueError) as error:
        make_trainer(rank, config)
    return str(error.value)


@pytest.mark.long
def test_what_was_trained_can_be_frozen_later_but_not_the_other_way_round(tmp_path):
    """Among what is frozen are all matrices that Muon updates."""
    config = settings(tmp_path / "run", **{**SMALL, "model": SHALLOW, "optim": MUON, "steps": 1})
    run_ranks(2, train, config)
    trained = saved_weights(tmp_path / "run", "swiglu")
    frozen = change(config, steps=2, resume=str(tmp_path / "run"))
    run_ranks(2, freeze_and_resume, frozen, r"^(?!layers\.1\.\w+norm|head)")
    kept = saved_weights(tmp_path / "run", "swiglu")
    same = {name for name, weight in kept.items() if torch.equal(weight, trained[name])}
    assert {*kept} - same == {"layers.1.attention_norm.weight", "layers.1.mlp_norm.weight", "head.weight"}
    run_ranks(2, freeze_and_resume, change(frozen, steps=3), r"^(?!layers\.1\.\w+norm|head)")
    errors = run_ranks(2, resume_error, change(frozen, steps=4))
    assert errors[0] == errors[1]
    problem = r"step-000003 has no (exp_avg|momentum)\.\S+, and \d+ more: the weight was frozen; "
    way_out = r"freeze it again, or start a new run from exported weights \(--weights\)$"
    assert re.search(problem + way_out, errors[0])


# ---- Errors ----


def frozen_trainer_error(rank, config, pattern):
    with pytest.MonkeyPatch.context() as patch:
        Freezer(patch, pattern if isinstance(pattern, str) else pattern[rank])
        return resume_error(rank, config)


def test_a_model_without_trained_parameters_is_an_error(tmp_path):
    one, other = run_ranks(2, frozen_trainer_error, settings(tmp_path, **SMALL), "")
    assert one == other == "all parameters of the model are frozen (requires_grad=False): there is nothing to train"


def test_replicas_that_are_frozen_on_one_rank_only_are_an_error(tmp_path):
    config = settings(tmp_path, **{**SMALL, "model": SHALLOW}, pp=1)
    one, other = run_ranks(2, frozen_trainer_error, config, ["^head|^embedding", "^embedding"])
    where, way_out = "head.weight, replicated on ranks 0, 1", "set requires_grad alike on all of them"
    assert one == other == f"{where}: frozen on some ranks and trained on others; {way_out}"


def test_all_ranks_report_replicas_of_one_stage_that_are_frozen_on_one_rank_only(tmp_path):
    """Ranks 2 and 3 hold the last stage. Rank 0, which prints the error, has no such replicas."""
    config = settings(tmp_path, **{**SMALL, "model": SHALLOW}, pp=2, batch_size=8, schedule="1f1b")
    errors = run_ranks(4, frozen_trainer_error, config, ["^layers.0", "^layers.0", "^layers.1", "^head|^layers.1"])
    assert {error.split(":")[0] for error in errors} == {"head.weight, replicated on ranks 2, 3"}


def test_all_ranks_check_the_shared_embedding_before_any_of_them_stops(tmp_path):
    """With MTP, the ranks of the first stage also belong to a group with those of the last stage."""
    model = dataclasses.replace(SHALLOW, mtp_layers=1)
    config = settings(tmp_path, **{**SMALL, "model": model}, pp=2, batch_size=8, schedule="1f1b")
    errors = run_ranks(4, frozen_trainer_error, config, ["^layers.0", "^head", "^head|^embedding", "^head"])
    assert {error.split(":")[0] for error in errors} == {
        "layers.0.attention.out.weight and 5 more, replicated on ranks 0, 1"
    }


def frozen_drift(rank, config):
    trainer = make_trainer(rank, config)
    for stage in trainer.stages.values():
        for name, parameter in stage.named_parameters():
            if name == "layers.1.mlp.experts.up":
                parameter.detach()[1, 0, 0] += rank
    with pytest.raises(RuntimeError, match=r"ranks 0, 1 disagree in layers\.1\.mlp\.experts\.up: replicas must stay"):
        trainer.check_replicas()


def test_frozen_weights_that_differ_between_replicas_are_an_error(tmp_path):
    run_ranks(2, frozen_drift, settings(tmp_path, **SMALL))


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


def test_the_planner_counts_no_gradients_and_no_optimizer_state_for_frozen_weights():
    batch, schedule = MicroBatch(1, 16, 4), build("dualpipe", 2, 4)
    model = build_model(LOW_RANK)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    whole, sharded = (peak_memory(LOW_RANK, schedule, batch, 1, "fp32", zero) for zero in (False, True))
    for rank, shared in zip(whole, sharded, strict=True):
        total = rank.dense_parameters + rank.expert_parameters  # DualPipe: every rank holds the whole model
        assert (rank.weights, rank.gradients, rank.optimizer) == (4 * total, 4 * (total - frozen), 8 * (total - frozen))
        assert shared.optimizer < 0.6 * rank.optimizer


def test_the_introduction_says_how_many_parameters_are_trained(tmp_path):
    model = build_model(LOW_RANK)
    trained, frozen = (sum(p.numel() for p in model.parameters() if p.requires_grad == kind) for kind in (True, False))
    printed, _ = run_ranks(2, introduction, settings(tmp_path, **SMALL))
    assert f" M active, {trained / 1e6:.2f} M trained, {frozen / 1e6:.2f} M frozen\n" in printed
