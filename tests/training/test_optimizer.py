"""The optimizer: its numbers, which matrix gets which update, who updates what, and the course of the learning rate."""

import dataclasses
import itertools
import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from moe_dualpipe.models import build_model, stacked_matrices
from moe_dualpipe.runtime.groups import Groups
from moe_dualpipe.runtime.replicas import ReplicaSet, replica_sets
from moe_dualpipe.runtime.zero import assign_owners
from moe_dualpipe.training.command_line import parse_arguments
from moe_dualpipe.training.config import OptimizerConfig
from moe_dualpipe.training.learning_rate import learning_rate
from moe_dualpipe.training.optimizer import Optimizer
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, change, losses, make_plan, options, resolve, settings, train, train_each

OPTIM = OptimizerConfig(lr=0.1, warmup_steps=4, final_lr=0.2, weight_decay=0.5)
WSD = dataclasses.replace(OPTIM, schedule="wsd", decay_steps=9)

# ---- Learning rate ----


def test_learning_rate_warms_up_and_ends_where_it_says():
    rates = [learning_rate(OPTIM, step, 14) for step in range(14)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[4] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.02)
    assert rates[9] == pytest.approx(0.1 * (0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * 5 / 9))))
    assert all(a >= b for a, b in itertools.pairwise(rates[3:]))
    assert learning_rate(OPTIM, 0, 1) == pytest.approx(0.025)


def test_wsd_stays_at_the_peak_and_falls_by_a_root_in_the_last_steps():
    rates = [learning_rate(WSD, step, 30) for step in range(30)]
    assert rates[:4] == pytest.approx([0.025, 0.05, 0.075, 0.1])
    assert rates[3:21] == [0.1] * 18
    assert rates[21:] == pytest.approx([0.1 * (0.2 + 0.8 * (1 - math.sqrt(i / 9))) for i in range(1, 10)])
    assert rates[-1] == pytest.approx(0.02)


def test_a_longer_wsd_run_goes_on_where_a_shorter_one_was_before_its_decay():
    for total in (13, 30, 1000):
        before = [learning_rate(WSD, step, total) for step in range(total - 9)]
        assert before == [learning_rate(WSD, step, 5000) for step in range(total - 9)]
        assert learning_rate(WSD, total - 9, total) < 0.1 == learning_rate(WSD, total - 9, 5000)


def test_wsd_decays_over_a_fifth_of_the_run_unless_told():
    by_default = dataclasses.replace(WSD, decay_steps=None)
    rates = [learning_rate(by_default, step, 31) for step in range(31)]
    assert [step for step in range(4, 31) if rates[step] < 0.1] == [*range(24, 31)]


@pytest.mark.parametrize("arguments,message", [
    (["--optim.decay-steps", "5"], "--optim.decay-steps 5 is for --optim.schedule wsd: cosine decays in all steps"),
    (["--optim.schedule", "wsd", "--steps", "24"],
     "20 warm-up and 5 decay steps do not fit into --steps 24: use fewer --optim.warmup-steps or"),
    (["--optim.schedule", "wsd", "--optim.decay-steps", "301"], "20 warm-up and 301 decay steps do not fit"),
    (["--optim.schedule", "wsd", "--optim.decay-steps", "-1"], "--optim.decay-steps must be at least 1: got -1"),
    (["--optim.momentum", "1"], "--optim.momentum must be at least 0 and below 1: got 1.0"),
], ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "")  # fmt: skip
def test_contradictions_are_told_before_the_run(arguments, message):
    with pytest.raises(ValueError) as error:
        resolve(["--device", "cpu", *arguments])
    assert str(error.value).startswith(message)


def test_names_and_schedules_are_checked_and_what_fits_is_taken():
    for field in ("name", "schedule"):
        optim = dataclasses.replace(OPTIM, **{field: "sgd"})
        with pytest.raises(ValueError, match=rf"--optim.{field} must be \w+ or \w+: got 'sgd'"):
            resolve(options(device="cpu", optim=optim))
    resolve(["--device", "cpu", "--optim.schedule", "wsd", "--steps", "25"])
    resolve(["--device", "cpu", "--optim.schedule", "wsd", "--optim.decay-steps", "300"])
    assert parse_arguments([]).parallel.zero
    assert not parse_arguments(["--no-zero"]).parallel.zero


# ---- AdamW ----


def alone(parameters, config=OPTIM, local_experts=None, stacked=None):
    return Optimizer([ReplicaSet(parameters, None, local_experts)], config, stacked=stacked)


def make_pair(dtype):
    parameters = {"matrix": nn.Parameter(torch.randn(3, 2, dtype=dtype)), "norm": nn.Parameter(torch.ones(2).to(dtype))}
    return parameters, alone(parameters)


def test_fp32_steps_are_adamws_with_decay_on_matrices_only():
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


def test_stacked_experts_decay_and_the_moments_follow_the_betas():
    parameters = {"mlp.experts.up": nn.Parameter(torch.ones(2, 2, 2))}
    optimizer = alone(parameters, OptimizerConfig(weight_decay=0.5, beta1=0.5), range(3, 5))
    parameters["mlp.experts.up"].grad = torch.zeros(2, 2, 2)
    optimizer.step(0.1, 1.0)
    assert parameters["mlp.experts.up"][0, 0, 0].item() == pytest.approx(0.95)
    parameters["mlp.experts.up"].grad = torch.ones(2, 2, 2)
    optimizer.step(0.1, 1.0)
    assert optimizer.tensors()["exp_avg.mlp.experts.up.4"][0, 0].item() == 0.5


def test_loading_rounds_the_master_weights_into_a_bf16_model():
    parameters, optimizer = make_pair(torch.bfloat16)
    optimizer.tensors()["model.matrix"].fill_(3.0)
    optimizer.after_load(7)
    assert (parameters["matrix"] == 3).all()
    assert optimizer.adamw.state[optimizer.master["matrix"]]["step"] == 7


# ---- Muon ----


def test_steps_are_torch_muons_of_each_matrix_by_itself_and_adamws_of_the_rest():
    """On a whole model: every row range below is a matrix of its own, to torch's Muon; all else is AdamW's."""
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
        lr=0.02, weight_decay=0.3, betas=(0.9, 0.95),
    )  # fmt: skip

    config = OptimizerConfig(name="muon", weight_decay=0.3, momentum=0.8)
    parameters = dict(model.named_parameters())
    optimizer = Optimizer(replica_sets([model], Groups()), config, stacked=stacked_matrices([model]))
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


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_what_modules_say_they_stack_is_what_they_have(attention):
    model = build_model(dataclasses.replace(MODEL, attention=attention, q_rank=24, kv_rank=12, rope_dim=6))
    stacked = stacked_matrices([model])
    parameters = dict(model.named_parameters())
    for name, rows in stacked.items():
        assert sum(rows) == parameters[name].shape[-2], name
    assert set(stacked) == {
        name for name in parameters if "gate_up" in name or "qkv" in name or "attention.down" in name
    }
    if attention == "mla":
        assert stacked["layers.2.attention.down.weight"] == (24, 12, 6)


def test_rows_that_do_not_fit_are_told():
    parameters = {"mix": nn.Parameter(torch.randn(5, 2))}
    with pytest.raises(ValueError, match=r"mix has 5 rows: `stacked` cannot divide them into \[2, 2\]"):
        alone(parameters, OptimizerConfig(name="muon"), stacked={"mix": (2, 2)})


# ---- ZeRO-1 ----


def test_assign_docstring_example_and_its_balance():
    assert assign_owners({"a": 5, "b": 3, "c": 3}, 2) == {"a": 0, "b": 1, "c": 1}
    assert assign_owners({"only": 7}, 3) == {"only": 0}
    draw = random.Random(0)
    for owners, count in itertools.product((1, 2, 3, 8), (1, 5, 40)):
        sizes = {f"p{i}": draw.choice((1, 7, 128, 5000, 5001)) for i in range(count)}
        chosen = assign_owners(sizes, owners)
        assert chosen == assign_owners(dict(reversed(sizes.items())), owners)
        loads = [sum(sizes[name] for name in sizes if chosen[name] == owner) for owner in range(owners)]
        assert max(loads) - min(loads) <= max(sizes.values())
        mean = sum(sizes.values()) / owners  # Graham's bound for the largest first (1969)
        assert max(loads) <= (4 / 3) * max(mean, *sizes.values())


SHAPES = {"embedding": (13, 6), "layers.0.qkv": (10, 6), "layers.0.out": (6, 5), "layers.0.norm": (6,), "scale": ()}
EXPERTS = {"layers.1.mlp.experts.gate_up": (3, 8, 6), "layers.1.mlp.experts.down": (3, 6, 4)}
STACKED = {"layers.0.qkv": (4, 3, 3), "layers.1.mlp.experts.gate_up": (4, 4)}


def make_sets(dtype, seed, groups):
    """The replica sets of a rank whose experts are drawn from `seed`: dense, experts, and one with a single piece."""
    sets = []
    for shapes, salt, group in zip((SHAPES, EXPERTS, {"lonely": (3, 2)}), (0, seed, 0), groups, strict=True):
        generator = torch.Generator().manual_seed(salt)
        order = sorted(shapes, reverse=bool(group and dist.get_rank() % 2))  # stages are built in different orders
        values = {name: torch.randn(shapes[name], generator=generator).to(dtype) for name in sorted(shapes)}
        experts = range(3 * seed, 3 * seed + 3) if shapes is EXPERTS else None
        sets.append(ReplicaSet({name: nn.Parameter(values[name]) for name in order}, group, experts))
    return sets


def steps(sets, config, zero, seed):
    """Three updates from random gradients, equal on all replicas; the optimizer after them."""
    optimizer = Optimizer(sets, config, zero, STACKED)
    for step in range(3):
        for one, salt in zip(sets, (0, seed, 0), strict=True):
            generator = torch.Generator().manual_seed(100 * step + salt)
            for parameter in one.parameters.values():
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step(0.01 * (step + 1), torch.tensor(0.3, dtype=torch.float64))
    return optimizer


def sharded_and_not(rank, spread):
    """On every rank and for all kinds of optimizers: same weights, same state, and only a share of the latter."""
    size = dist.get_world_size()
    seed, world = rank % spread, dist.group.WORLD
    members = [[r for r in range(size) if r % spread == s] for s in range(spread)]
    peers = [dist.new_group(ranks) for ranks in members][seed] if size > spread else None
    shares = {}
    for dtype, name in itertools.product((torch.float32, torch.bfloat16), ("adamw", "muon")):
        config, groups = OptimizerConfig(name=name, weight_decay=0.4), (world, peers, world)
        whole_sets, sets = make_sets(dtype, seed, groups), make_sets(dtype, seed, groups)
        whole = steps(whole_sets, config, False, seed)
        sharded = steps(sets, config, True, seed)
        for one, other in zip(whole_sets, sets, strict=True):
            for parameter in one.parameters:
                assert torch.equal(one.parameters[parameter], other.parameters[parameter]), (rank, dtype, parameter)
        expected = whole.tensors()
        for key, tensor in sharded.tensors().items():
            assert torch.equal(tensor, expected[key]), (rank, dtype, key)
        shares[str(dtype), name] = ([*sharded.tensors()], [*expected], sharded.state_bytes, whole.state_bytes)
    return shares


@pytest.mark.parametrize("ranks,spread", [(2, 1), (2, 2), (4, 2)])
def test_a_step_with_divided_state_is_one_without_and_every_piece_has_one_owner(ranks, spread):
    seen = run_ranks(ranks, sharded_and_not, spread)
    for key, (*_, all_bytes) in seen[0].items():
        wholes = {name for rank in range(ranks) for name in seen[rank][key][1]}
        owned = [name for rank in range(ranks) for name in seen[rank][key][0]]
        assert sorted(owned) == sorted(wholes), key
        dense = {("torch.float32", "adamw"): 2, ("torch.bfloat16", "adamw"): 3}.get(key)
        if dense:  # numbers of fp32 kept for each weight, over all ranks: dense weights once, experts once
            weights = 13 * 6 + 60 + 30 + 6 + 1 + 6 + spread * 3 * (48 + 24)
            assert sum(seen[rank][key][2] for rank in range(ranks)) == 4 * dense * weights
        most = max(seen[rank][key][2] for rank in range(ranks))
        assert most < all_bytes
        if dense and spread < ranks:  # experts have replicas, too
            assert most < 0.6 * all_bytes


def owners_of_one(rank):
    parameters = {"lonely": nn.Parameter(torch.ones(3, 2))}
    optimizer = Optimizer([ReplicaSet(parameters, dist.group.WORLD)], OptimizerConfig(name="muon"))
    parameters["lonely"].grad = torch.full((3, 2), rank + 1.0)  # only the owner's gradient counts
    optimizer.step(0.1, 1.0)
    return optimizer.state_bytes, len(optimizer.tensors()), parameters["lonely"].tolist()


def test_an_owner_of_nothing_takes_what_others_updated():
    (bytes0, names0, first), *others = run_ranks(3, owners_of_one)
    assert (bytes0, names0) == (4 * 6, 2)
    assert first != [[1.0, 1.0]] * 3
    for bytes_, names, weight in others:
        assert (bytes_, names) == (0, 0)
        assert weight == first


# ---- Whole runs ----

CLOCKS = ("seconds", "tokens_per_s", "peak_memory_mb")
MUON = OptimizerConfig(name="muon", warmup_steps=1, schedule="wsd", decay_steps=1)


def without_clocks(run):
    return [{key: value for key, value in record.items() if key not in CLOCKS} for record in run]


@pytest.mark.parametrize(
    "ranks,changes", [(2, {}), (2, {"dtype": "bfloat16", "pp": 1}), (4, {"pp": 2, "ep": 2})], ids=str
)
def test_dividing_the_state_changes_no_bit_of_a_run(tmp_path, ranks, changes):
    small = {"steps": 2, "seq_len": 16, "eval_sequences": 1, **changes}
    choices = {"zero": {}, "whole": {"zero": False}, "zero-muon": {"optim": MUON}}
    choices["whole-muon"] = {"optim": MUON, "zero": False}
    configs = [settings(tmp_path / name, **small, **choice) for name, choice in choices.items()]
    zero, whole, zero_muon, whole_muon = map(without_clocks, run_ranks(ranks, train_each, configs)[0])
    assert zero == whole
    assert zero_muon == whole_muon
    assert zero[-1] != zero_muon[-1]


def resumed(rank, first, *others):
    """Save half of a run; the losses of all of it, and those of the others from there."""
    whole = train(rank, change(first, save_every=2))
    half = f"{first.checkpoint.out}/checkpoints/step-000002"
    return [losses(run) for run in (whole, *train_each(rank, [change(c, resume=half) for c in others]))]


@pytest.mark.parametrize("zero,changes,division,rel", [
    (True, {"pp": 1, "dtype": "bfloat16"}, {"ep": 2}, 1e-3),
    (False, {"optim": MUON}, {"schedule": "1f1b"}, 1e-3),
], ids=["bf16", "muon"])  # fmt: skip
def test_runs_resume_with_and_without_divided_state(tmp_path, zero, changes, division, rel):
    """Bit for bit where the work is divided alike; other divisions round differently, and Muon rounds to bf16."""
    first = settings(tmp_path / "first", steps=4, seq_len=16, eval_sequences=1, zero=zero, **changes)
    second = change(first, zero=not zero, out=str(tmp_path / "second"))
    moved = change(second, out=str(tmp_path / "moved"), **division)
    whole, same, near = run_ranks(2, resumed, first, second, moved)[0]
    assert same == {step: loss for step, loss in whole.items() if step > 2}
    assert near == pytest.approx(same, rel=rel)


def test_another_optimizer_cannot_use_the_state(tmp_path):
    run_ranks(1, train, settings(tmp_path, steps=1, optim=dataclasses.replace(MUON, warmup_steps=0, decay_steps=1)))
    with pytest.raises(
        ValueError, match=r"step-000001 holds the state of muon, which adamw cannot use: use --optim.name"
    ):
        make_plan(settings(tmp_path, resume=str(tmp_path)))
    make_plan(settings(tmp_path, resume=str(tmp_path), optim=MUON))
