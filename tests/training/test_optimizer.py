"""AdamW and Muon compared with torch's own; learning rates; owners of divided state; parameters that are frozen."""

import dataclasses
import itertools
import math
import random
from unittest import mock

import pytest
import torch
from torch import nn

from moe_dualpipe.models import TransformerStage, build_model, elementwise_matrices, stacked_matrices
from moe_dualpipe.pipeline import pipeline as pipeline_module
from moe_dualpipe.runtime import muon as muon_file
from moe_dualpipe.runtime.groups import Groups
from moe_dualpipe.runtime.learning_rate import learning_rate
from moe_dualpipe.runtime.muon import orthogonalize
from moe_dualpipe.runtime.optimizer import Optimizer
from moe_dualpipe.runtime.replicas import ReplicaSet, assign_owners, replica_sets
from moe_dualpipe.training.config import OptimizerConfig
from tests.support.pipelines import freeze
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, SHALLOW, change, equal_tensors, make_trainer, settings, weights_of

OPTIM = OptimizerConfig("adamw", lr=0.1, warmup_steps=4, final_lr=0.2, weight_decay=0.5)


def test_owners_of_divided_state_have_even_loads_in_any_order():
    draw = random.Random(0)
    for owners, count in itertools.product((1, 2, 3, 8), (1, 5, 40)):
        sizes = {f"p{i}": draw.choice((1, 7, 128, 5000, 5001)) for i in range(count)}
        chosen = assign_owners(sizes, owners)
        assert chosen == assign_owners(dict(reversed(sizes.items())), owners)
        loads = [sum(sizes[name] for name in sizes if chosen[name] == owner) for owner in range(owners)]
        mean = sum(sizes.values()) / owners  # Graham's bound for the largest first (1969)
        assert max(loads) <= (4 / 3) * max(mean, *sizes.values())


# ---- AdamW ----


def alone(parameters, config=OPTIM, experts=None, stacked=None):
    return Optimizer([ReplicaSet(parameters, None, experts or {})], config, stacked=stacked)


def make_pair(dtype):
    parameters = {"matrix": nn.Parameter(torch.randn(3, 2, dtype=dtype)), "norm": nn.Parameter(torch.ones(2).to(dtype))}
    return parameters, alone(parameters)


def test_fp32_steps_equal_torch_adamw_with_decay_on_matrices_only():
    parameters, optimizer = make_pair(torch.float32)
    copies = {name: nn.Parameter(p.detach().clone()) for name, p in parameters.items()}
    adamw = torch.optim.AdamW(
        [{"params": [copies["matrix"]], "weight_decay": 0.5}, {"params": [copies["norm"]], "weight_decay": 0.0}],
        betas=(OPTIM.beta1, OPTIM.beta2),
    )
    for step in range(3):
        for name, p in parameters.items():
            p.grad = torch.randn_like(p)
            copies[name].grad = p.grad * 0.25
        for group in adamw.param_groups:
            group["lr"] = 0.1 / (step + 1)
        adamw.step()
        optimizer.step(0.1 / (step + 1), grad_scale=0.25)
        assert all(p.grad is None for p in parameters.values())
    for name, p in parameters.items():
        torch.testing.assert_close(p, copies[name], rtol=0, atol=0)
    assert optimizer.state_bytes == 2 * 4 * (6 + 2)  # two moments, and no other copy of the weights


def test_bf16_weights_keep_small_updates_in_their_fp32_master():
    parameters, optimizer = make_pair(torch.bfloat16)
    norm, master = parameters["norm"], optimizer.master["norm"]
    assert master.dtype == torch.float32
    assert optimizer.state_bytes == 3 * 4 * (6 + 2)
    for _ in range(20):
        for p in parameters.values():
            p.grad = torch.ones(p.shape)
            assert p.grad_dtype == torch.float32
        optimizer.step(2**-12, grad_scale=1.0)  # Adam moves by about the learning rate, far below bf16's step at 1
    assert master[0].item() == pytest.approx(1 - 20 * 2**-12, abs=1e-4)
    assert torch.equal(norm, master.bfloat16())
    assert norm[0].item() < 1


def test_loading_rounds_the_master_weights_into_a_bf16_model():
    parameters, optimizer = make_pair(torch.bfloat16)
    optimizer.tensors()["model.matrix"].fill_(3.0)
    optimizer.after_load(7)
    assert (parameters["matrix"] == 3).all()
    assert optimizer.adamw.state[optimizer.master["matrix"]]["step"] == 7


# ---- Muon ----


def test_muon_equals_torch_muon_per_matrix_and_torch_adamw_for_the_rest(monkeypatch):
    """On a whole model. `split` has the rows of each matrix; torch's AdamW updates all other parameters."""
    monkeypatch.setattr(muon_file, "iteration_dtype", lambda _: torch.bfloat16)
    model = build_model(dataclasses.replace(MODEL, num_layers=2, num_heads=3, num_kv_heads=1))
    model.register_parameter("bias", nn.Parameter(torch.randn(3)))
    qkv, halves = [(0, 48), (48, 64), (64, 80)], [(0, 32), (32, 64)]
    split = {
        "layers.0.attention.qkv.weight": qkv, "layers.1.attention.qkv.weight": qkv,
        "layers.0.attention.out.weight": [(0, 32)], "layers.1.attention.out.weight": [(0, 32)],
        "layers.0.mlp.gate_up.weight": [(0, 64), (64, 128)], "layers.0.mlp.down.weight": [(0, 32)],
        "layers.1.mlp.experts.gate_up": halves, "layers.1.mlp.experts.down": [(0, 32)],
        "layers.1.mlp.shared.gate_up.weight": halves, "layers.1.mlp.shared.down.weight": [(0, 32)],
    }  # fmt: skip
    copies = {name: p.detach().clone() for name, p in model.named_parameters()}
    for copy in copies.values():
        copy.grad = torch.zeros_like(copy)
    matrices = []
    for name, rows in split.items():
        weight, grad = copies[name], copies[name].grad
        assert grad is not None
        for w, g in zip(weight, grad, strict=True) if weight.ndim == 3 else [(weight, grad)]:
            for start, end in rows:
                matrix = w[start:end]
                matrix.grad = g[start:end]
                matrices.append(matrix)
    rest = [copy for name, copy in copies.items() if name not in split]
    assert len(rest) == 2 + 1 + 5 + 1  # embedding and head, router, norms, the bias
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.3, momentum=0.8, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(
        [{"params": [p for p in rest if p.ndim > 1]}, {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0}],
        lr=0.02, weight_decay=0.3, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip

    config = OptimizerConfig(name="muon", weight_decay=0.3, momentum=0.8)
    parameters = dict(model.named_parameters())
    declared = {"stacked": stacked_matrices([model]), "elementwise": elementwise_matrices([model])}
    optimizer = Optimizer(replica_sets([model], Groups()), config, **declared)
    for _ in range(3):
        for name, p in parameters.items():
            p.grad = torch.randn_like(p)
            copies[name].grad.copy_(p.grad * 0.5)
        muon.step()
        adamw.step()
        optimizer.step(0.02, 0.5)
    for name, p in parameters.items():
        assert torch.equal(p, copies[name]), name
    moments = {name.partition(".")[0] for name in optimizer.tensors() if "layers.1.mlp.experts.gate_up.3" in name}
    assert moments == {"model", "momentum"}


@pytest.mark.parametrize("shape", [(7, 24, 40), (5, 40, 24), (3, 32, 32), (1, 1, 9)], ids=str)
def test_in_fp32_muon_is_as_exact_as_in_fp64_and_near_to_bf16(shape):
    x = torch.randn(shape, dtype=torch.float64)
    exact = orthogonalize(x, torch.float64)
    assert (orthogonalize(x, torch.float32) - exact).norm() < 1e-5 * exact.norm()
    assert (orthogonalize(x, torch.bfloat16) - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize("shape", [(12, 16), (16, 40), (32, 48), (128, 64)], ids=str)
def test_a_matrix_has_the_same_update_in_any_batch(shape):
    """So that a divided optimizer state, where each rank has other matrices, gives the same bits."""
    for _ in range(60):
        x = torch.randn(9, *shape)
        dtype = muon_file.iteration_dtype(x)
        whole = orthogonalize(x, dtype)
        assert torch.equal(torch.cat([orthogonalize(x[i : i + 1], dtype) for i in range(9)]), whole)
        assert torch.equal(orthogonalize(x[[4, 1]], dtype), whole[[4, 1]])


def test_stacked_rows_that_do_not_add_up_are_rejected():
    parameters = {"mix": nn.Parameter(torch.randn(5, 2))}
    with pytest.raises(ValueError, match=r"mix has 5 rows: `stacked` cannot divide them into \[2, 2\]"):
        alone(parameters, OptimizerConfig(name="muon"), stacked={"mix": (2, 2)})


WSD = dataclasses.replace(OPTIM, schedule="wsd", decay_steps=9)


def test_cosine_warms_up_and_decays_to_final_lr():
    rates = [learning_rate(OPTIM, step, 14) for step in range(14)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.02)
    assert rates[9] == pytest.approx(0.1 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 5 / 9))))
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(OPTIM, 0, 1) == pytest.approx(0.025)


def test_wsd_is_constant_and_then_decays_as_1_minus_sqrt():
    rates = [learning_rate(WSD, step, 30) for step in range(30)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[3:21] == [0.1] * 18
    assert rates[21:] == pytest.approx([0.1 * (0.2 + 0.8 * (1 - math.sqrt(i / 9))) for i in range(1, 10)])
    by_default = dataclasses.replace(WSD, decay_steps=None)
    assert [step for step in range(4, 31) if learning_rate(by_default, step, 31) < 0.1] == [*range(24, 31)]


def test_wsd_runs_of_any_length_are_equal_before_the_decay():
    for total in (13, 30, 1000):
        before = [learning_rate(WSD, step, total) for step in range(total - 9)]
        assert before == [learning_rate(WSD, step, 5000) for step in range(total - 9)]
        assert learning_rate(WSD, total - 9, total) < 0.1 == learning_rate(WSD, total - 9, 5000)


# ---- ZeRO-1 over dp x cp ----


def sizes_of_states(rank, configs):
    """Numbers in the optimizer state of this rank."""
    return [sum(t.numel() for t in make_trainer(rank, config).optimizer.tensors().values()) for config in configs]


def test_context_parallel_ranks_divide_the_optimizer_state(tmp_path):
    """As data-parallel ranks do. Every parameter is on one of them, experts too."""
    changes = {"pp": 1, "seq_len": 16, "steps": 1}
    layouts = {"cp": 2}, {"cp": 2, "zero": False}, {"cp": 1}
    configs = [settings(tmp_path / str(i), **changes, **one) for i, one in enumerate(layouts)]
    (cp, whole, dp), (other_cp, _, other_dp) = run_ranks(2, sizes_of_states, configs)
    assert cp + other_cp == whole and {cp, other_cp} == {dp, other_dp}
    assert max(cp, other_cp) < 0.55 * whole


# ---- `--freeze PATTERN` gives the same run as layers that freeze their own parameters, in every layout ----


EXPERTS_AND_EMBEDDING = ("*.experts.*", "embedding.weight")
SMALL = {"seq_len": 16, "eval_sequences": 1, "steps": 4, "optim": OptimizerConfig(lr=0.05, warmup_steps=0)}
MUON = OptimizerConfig("muon", lr=0.05, warmup_steps=0)


class FrozenStage(TransformerStage):
    """A stage whose layers freeze their parameters themselves."""

    def __init__(self, *args):
        super().__init__(*args)
        freeze(self, r"\.experts\.|^embedding\.weight$")


def frozen_by_option_and_by_layer(rank, config):
    """Train three steps with `--freeze`, and with layers that freeze the same parameters; compare all bits."""
    trainer = make_trainer(rank, change(config, freeze=EXPERTS_AND_EMBEDDING))
    before = {name: tensor.clone() for name, tensor in weights_of(trainer).items()}
    with mock.patch.object(pipeline_module, "TransformerStage", FrozenStage):
        other = make_trainer(rank, config)
    for step in range(3):
        records = [{**one.step(step).record, "seconds": 0, "tokens_per_s": 0} for one in (trainer, other)]
        assert all(records[0][kind] == records[1][kind] for kind in ("loss", "grad_norm"))
    after = weights_of(trainer)
    assert equal_tensors(after, weights_of(other))
    frozen = {name for name in after if torch.equal(after[name], before[name])}
    assert frozen == {name for name in after if ".experts." in name or name == "embedding.weight"} != set()
    assert equal_tensors(trainer.optimizer.tensors(), other.optimizer.tensors())
    trainer.check_replicas()


@pytest.mark.parametrize("ranks,changes", [
    (1, {}),
    (2, {}),
    (2, {"pp": 1, "ep": 2, "dtype": "bfloat16", "optim": MUON}),
    (2, {"pp": 1, "zero": False, "dtype": "bfloat16"}),
    (4, {"pp": 2, "ep": 2, "batch_size": 8, "model": dataclasses.replace(SHALLOW, mtp_layers=1)}),
], ids=lambda value: "" if isinstance(value, int) else ",".join(value))  # fmt: skip
@pytest.mark.quick("-pp,ep,dtype,optim")
def test_frozen_parameters_keep_all_bits_and_the_others_train_as_if_the_layer_had_frozen_them(
    tmp_path, ranks, changes
):  # fmt: skip
    run_ranks(ranks, frozen_by_option_and_by_layer, settings(tmp_path, **{**SMALL, **changes}))


@pytest.mark.parametrize("frozen", [True, False])
def test_freezing_after_the_optimizer_was_built_is_an_error(frozen):
    parameters = {name: nn.Parameter(torch.ones(3, 2)) for name in ("a", "b")}
    parameters["b"].requires_grad_(not frozen)
    optimizer = Optimizer([ReplicaSet(parameters, None)], OptimizerConfig())
    parameters["b"].requires_grad_(frozen)
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    with pytest.raises(
        RuntimeError, match=r"^requires_grad of b changed after the optimizer was built: set it before$"
    ):
        optimizer.step(0.1, 1.0)
