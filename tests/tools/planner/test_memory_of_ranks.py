"""Memory of ranks: parameters of real stages, peak activations of schedules, shared optimizer state."""

import dataclasses
import json
from collections import Counter

import pytest
import torch
from moe_dualpipe.tools.planner.parameters import parameter_sizes

from moe_dualpipe.cli import main
from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.expert_parallel.parameters import expert_ids, global_tensors
from moe_dualpipe.models import ModelConfig, StageSpec, TransformerStage, split
from moe_dualpipe.schedule import Forward, Part, build, members
from moe_dualpipe.tools.planner.activations import MicroBatch, deferred_bytes, rows_received, saved_bytes
from moe_dualpipe.tools.planner.peak import peak_memory
from moe_dualpipe.training.layout_choice import choose
from tests.support.ranks import run_ranks
from tests.support.runs import MODEL, make_trainer, options, settings

CONFIG = ModelConfig(vocab_size=40, hidden_size=12, num_layers=5, num_experts=6, experts_per_token=4)


def peak_activations(schedule, rank, saved, deferred):
    """The peak bytes of `rank` in the order of its actions: saved[s] from F to B or I, deferred[s] from I to W."""
    now = peak = 0
    for action in schedule.actions[rank]:
        parts = members(action)
        now += sum(saved[half.stage] for half in parts if isinstance(half, Forward))
        peak = max(peak, now)
        for half in parts:
            if not isinstance(half, Forward):
                now -= 0 if half.part is Part.WEIGHT else saved[half.stage]
                now += {Part.FULL: 0, Part.INPUT: 1, Part.WEIGHT: -1}[half.part] * deferred[half.stage]
        peak = max(peak, now)
    return peak


@pytest.mark.parametrize("element,state", [(2, 12), (4, 8)])
@pytest.mark.parametrize("options", [{}, {"tied_embeddings": True, "dense_layers": (2,), "shared_gate": True}], ids=str)
def test_ranks_hold_the_parameters_of_their_stages(element, state, options):
    config = dataclasses.replace(CONFIG, **options)
    schedule, batch = build("dualpipe", 4, 8), MicroBatch(2, 16, element, ep=3)
    specs = split(config, 4)
    precision = "fp32" if element == 4 else "bf16"
    ranks, sharded = (peak_memory(config, schedule, batch, 6, precision, zero) for zero in (False, True))
    for number, r in enumerate(ranks):
        held = Counter()
        stages = [TransformerStage(config, specs[stage], Loopback(6, 3)) for stage in (number, 3 - number)]
        for key, p in dict(p for stage in stages for p in stage.named_parameters()).items():  # one tied embedding
            held[".experts." in key] += p.numel()
        total = held[False] + held[True]
        assert (r.dense_parameters, r.expert_parameters) == (held[False], held[True])
        assert (r.weights, r.gradients, r.optimizer) == (element * total, 4 * total, state * total)
        saved = [saved_bytes(config, spec, batch) for spec in specs]
        deferred = [deferred_bytes(config, spec, batch) for spec in specs]
        assert r.activations == peak_activations(schedule, number, saved, deferred)
        assert r.total == r.weights + r.gradients + r.optimizer + r.activations + r.temporary
        assert dataclasses.replace(r, optimizer=0) == dataclasses.replace(sharded[number], optimizer=0)
        # 2 mirrored ranks x 6 pipelines hold the same dense parameters; a third of these ranks hold the same experts.
        fullest = max(sharded[number].optimizer, sharded[3 - number].optimizer)
        assert fullest >= state * (held[False] / 12 + held[True] / 4)
    assert ranks[0].activations == ranks[3].activations


def state_of_a_run(rank, config):
    return make_trainer(rank, config).optimizer.state_bytes


@pytest.mark.parametrize("ranks,changes,tied", [
    (4, {"pp": 2, "ep": 2, "dtype": "bfloat16"}, False), (4, {"pp": 1}, False), (2, {"schedule": "1f1b"}, False),
    (2, {"schedule": "1f1b"}, True), (4, {"pp": 2}, True),
], ids=str)  # fmt: skip
@pytest.mark.quick("4-{'pp': 2, 'ep': 2, 'dtype': 'bfloat16'}-False", "2-{'schedule': '1f1b'}-True")
def test_shared_optimizer_state_equals_that_of_a_run(tmp_path, ranks, changes, tied):
    """Owners get whole tensors. With a vocabulary of 3,000, two tensors are larger than an even share."""
    pp, ep, model = changes.get("pp", ranks), changes.get("ep", 1), dataclasses.replace(MODEL, vocab_size=3000)
    model = dataclasses.replace(model, tied_embeddings=tied)
    held = run_ranks(ranks, state_of_a_run, settings(tmp_path, model=model, batch_size=4 * ranks // pp, **changes))
    schedule = build(changes.get("schedule", "dualpipe" if pp > 1 else "1f1b"), pp, 4)
    precision = "bf16" if "dtype" in changes else "fp32"
    memory = peak_memory(model, schedule, MicroBatch(1, 32, ep=ep), ranks // pp, precision)
    predicted = [rank.optimizer for rank in memory]
    per_rank = [held[i : i + ranks // pp] for i in range(0, ranks, ranks // pp)]
    assert predicted == [max(replicas) for replicas in per_rank]


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_rows_received_equal_those_of_random_choices(ep):
    ids = torch.stack([torch.randperm(6)[:4] for _ in range(4000)])
    rows = sum(len(set((row // (6 // ep)).tolist())) for row in ids)
    assert rows_received(CONFIG, MicroBatch(4, 1000, ep=ep)) == pytest.approx(rows, rel=0.03)


@pytest.mark.parametrize("layers,dense", [(range(5), 2), (range(2, 5), 2), (range(2), 2), (range(1, 4), 9)])
@pytest.mark.parametrize("choices", [
    {"experts": "swiglu"}, {"experts": "examples/layers/squared_relu.py:SquaredReLUExperts"},
    {"dense_layers": (3,), "tied_embeddings": True, "shared_gate": True, "qkv_bias": True},
], ids=["swiglu", "squared relu", "options"])  # fmt: skip
def test_sizes_of_equal_layers_are_those_of_all_layers(layers, dense, choices):
    config = dataclasses.replace(CONFIG, num_dense_layers=dense, **choices)
    spec = StageSpec(layers, layers.start == 0, layers.stop == 5, 1.0)
    sizes = parameter_sizes(config, spec, ep=3)
    real, names = TransformerStage(config, spec, Loopback(6, 3)), {}
    ids = expert_ids(real)
    for name, parameter in real.named_parameters():
        names |= {n: t.numel() for n, t in global_tensors(name, parameter, ids.get(name))}
    assert sizes.dense | sizes.experts == names
    assert {n for n in names if ".experts." in n} == {*sizes.experts}
    assert sizes.frozen == {}


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
def test_auto_chooses_the_schedule_of_a_run(pp, capsys):
    chosen = choose(options(pp=pp, model=dataclasses.replace(MODEL, num_layers=8)), pp).name
    assert main(["model", "show", "olmoe-1b-7b", "--pp", str(pp)]) == 0
    assert f"\n{chosen} over {pp} pipeline x 1 data-parallel ranks" in capsys.readouterr().out


def test_the_command(capsys):
    assert main(["model", "show", "deepseek-v2-lite", "--pp", "4", "--ep", "16", "--dp", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["parameters"], found["active_parameters"]) == (15_706_484_224, 2_661_150_208)
    assert len(found["ranks"]) == 4
    # Both replicas of each stage, with a 16th of the experts each.
    dense = sum(r["dense_parameters"] for r in found["ranks"])
    experts = sum(r["expert_parameters"] for r in found["ranks"])
    assert dense + 16 * experts == 2 * found["parameters"]
    assert main(["model", "show", "tiny", "--dtype", "float32", "--json"]) == 0
    (rank,) = (found := json.loads(capsys.readouterr().out))["ranks"]
    assert (rank["weights"], rank["optimizer"]) == (4 * found["parameters"], 8 * found["parameters"])
    assert main(["model", "show", "tiny", "--pp", "2", "--schedule", "1f1b", "--recompute", "full"]) == 0
    assert "1.74 M parameters, 0.86 M active (0.82 M without" in capsys.readouterr().out


@pytest.mark.parametrize("arguments,problem", [
    ("tinny", "unknown preset 'tinny'; did you mean 'tiny'?"),
    ("tiny --ep 3", "--ep 3 does not divide 8 experts: use --ep 4"),
    ("tiny --ep 2 --dp 3", "--ep 2 does not divide 3 data-parallel ranks: use --ep 1"),
    ("tiny --pp 6", "4 layers cannot be divided over 6 pipeline stages"),
    ("deepseek-v3 --pp 15 --schedule dualpipe", "dualpipe needs an even number of pipeline ranks: got 15; use --pp 16"),
    ("tiny --pp 0", "--pp must be at least 1: got 0"),
    ("tiny --micro-batches -1", "--micro-batches must be at least 1: got -1"),
])  # fmt: skip
def test_invalid_options_print_one_line(arguments, problem, capsys):
    assert main(["model", "show", *arguments.split()]) == 2
    err = capsys.readouterr().err
    assert err.startswith("moe-dualpipe: error: ")
    assert problem in err
    assert err.count("\n") == 1
