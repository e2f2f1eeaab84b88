"""The whole prediction: its numbers agree, a measured step calibrates it, memory has an error bar, loads decide."""

import dataclasses
import math
import random
import re
from collections import Counter

import numpy as np
import pytest

from moe_dualpipe.expert_parallel.placement import imbalance, in_order, place_experts
from moe_dualpipe.pipeline.activations import MicroBatch
from moe_dualpipe.pipeline.peak_memory import peak_memory
from moe_dualpipe.tools.planner import (
    Workload,
    estimate,
    layout_of,
    load_device,
    read_shape,
)
from moe_dualpipe.tools.planner.constants import find_constant, read_constants
from moe_dualpipe.tools.planner.prediction import CHANGES, MEMORY_ERROR, ideal_seconds, routings
from moe_dualpipe.tools.planner.routing import MeasuredLoads, assumed_factor, max_over_mean
from moe_dualpipe.tools.planner.segment_times import layer_factors
from moe_dualpipe.tools.planner.stages import full_schedule, memory_of
from moe_dualpipe.tools.planner.step import step_of

V3 = Workload(
    read_shape("deepseek-v3"), load_device("h800"), layout_of(2048, 1, 16, 1, 64), global_batch=15360, precision="fp8",
    schedule="dualpipe", recompute="norms", ep_backend="deepep", violation=0.5,
)  # fmt: skip
SMALL = Workload(
    read_shape("olmoe-1b-7b"), load_device("h100"), layout_of(16, pp=2, ep=8), seq=2048, micro_batch=4,
    global_batch=256,
)  # fmt: skip


def test_the_numbers_of_a_report_agree():
    found = estimate(V3)
    report = found.as_dict()
    ends = [report[f"step_time{end}_s"] / found.step.seconds for end in ("_low", "", "_high")]
    assert ends == pytest.approx([found.constant.low, found.constant.factor, found.constant.high]) and ends == sorted(
        ends
    )
    gpu_seconds = 2048 * report["step_time_s"]
    assert report["tokens_per_s_per_gpu"] == pytest.approx(15360 * 4096 / gpu_seconds)
    assert report["gpu_hours_per_trillion_tokens"] == pytest.approx(1e12 / report["tokens_per_s_per_gpu"] / 3600)
    flops = V3.shape.train_flops(4096) * report["tokens_per_s_per_gpu"]
    assert report["model_tflops_per_gpu"] == pytest.approx(flops / 1e12)
    assert report["mfu"] == pytest.approx(flops / 1978.9e12)
    assert 0 < report["hidden_fraction"] < 1 and 0 < report["bubble_fraction"] < 1
    assert report["peak_memory_gb"] == pytest.approx(sum(report["memory_gb"].values())) == memory_of(V3).total / 1e9
    parts = [*found.waterfall()]
    assert report["waterfall_s"] == dict(parts) and sum(seconds for _, seconds in parts) == pytest.approx(found.seconds)
    assert parts[0][1] == ideal_seconds(V3) == pytest.approx(found.seconds * found.utilization)
    assert (parts[0][0], parts[-1][0]) == ("model FLOPs at the peak", "software")
    assert all(seconds >= 0 for _, seconds in parts[:-1])
    assert found.imbalance == assumed_factor(256, 8, 64, 0.5) > 1  # of the layers with experts: three of 61 are dense


def test_a_constant_is_the_sum_of_its_causes():
    known = {
        "mean": 0.1, "interval": {"new family": [0.3, 0.5], "known family": [0.2, 0.25]},
        "causes": {"gpu h800": {"log": 0.01, "runs": 4}, "software mine": {"log": 0.02, "runs": 3},
                    "gpu b200": {"log": 0.04, "runs": 1},
                    "experts launched one by one on a GPU with mxfp8": {"log": 0.08, "runs": 2}},
        "families": {"deepseek": {"log": 0.16, "runs": 5}},
    }  # fmt: skip
    b200 = dataclasses.replace(V3, device=load_device("b200"))
    other = dataclasses.replace(V3, shape=dataclasses.replace(V3.shape, name="strange"))
    dense = dataclasses.replace(b200, shape=read_shape("llama3-8b"))
    for load, software, log, runs, family, (fast, slow) in (
        (V3, None, 0.27, 4, 5, (0.2, 0.25)), (V3, "mine", 0.29, 4, 5, (0.2, 0.25)),
        (b200, None, 0.38, 1, 5, (0.2, 0.25)), (other, None, 0.11, 4, 0, (0.3, 0.5)),
        (dataclasses.replace(b200, cuda_graphs="full"), None, 0.30, 1, 5, (0.2, 0.25)),
        (dense, None, 0.14, 1, 0, (0.3, 0.5)),
    ):  # fmt: skip
        found = find_constant(load, software, known)
        assert math.log(found.factor) == pytest.approx(log)
        assert (found.runs, found.family_runs) == (runs, family)
        assert math.log(found.factor / found.low) == pytest.approx(fast)
        assert math.log(found.high / found.factor) == pytest.approx(slow)
    with pytest.raises(ValueError, match=r"--software must be one of automodel, deepseek, .*: got 'mine'"):
        estimate(V3, "mine")
    assert {"gpu h100", "software megatron"} <= {*read_constants()["causes"]}


def test_a_measured_step_replaces_the_constant():
    found = estimate(V3)
    own = found.measured(2 * found.seconds)
    assert own.seconds == pytest.approx(2 * found.seconds) and (own.step, own.memory) == (found.step, found.memory)
    assert own.interval == pytest.approx((own.seconds / 1.06, own.seconds * 1.06))


def test_differences_are_what_another_prediction_says():
    found = estimate(SMALL)
    slower, faster = found.differences(True), found.differences(False)
    for listed, sign in ((slower, 1), (faster, -1)):
        assert len(listed) >= 2 and [abs(more) for _, more in listed] == sorted(
            (abs(m) for _, m in listed), reverse=True
        )
        for what, more in listed:
            changed = estimate(dataclasses.replace(SMALL, **CHANGES[what])).seconds
            assert more == pytest.approx(changed - found.seconds) and more * sign > 0.01 * found.seconds
    names = " ".join(what for what, _ in slower)
    assert "--recompute full" in names and "--attention plain" in names
    assert "--ep-backend deepep" in (names := " ".join(what for what, _ in faster)) and "--overlap" in names
    short = estimate(dataclasses.replace(SMALL, micro_batch=1))
    assert "--cuda-graphs full" in short.differences(False)[0][0]


def test_memory_is_judged_with_its_error():
    def advice(memory_gb, **options):
        device = dataclasses.replace(SMALL.device, memory_gb=memory_gb)
        return estimate(dataclasses.replace(SMALL, device=device, **options)).memory_advice()

    kinds = {kind: memory_of(dataclasses.replace(SMALL, recompute=kind)).total / 1e9 for kind in ("none", "full")}
    total = kinds["none"]
    assert advice(1.01 * total * (1 + MEMORY_ERROR)) == ""
    for share in (0.99 * (1 + MEMORY_ERROR), 1.0, 1.01 / (1 + MEMORY_ERROR)):
        assert advice(share * total).startswith("It may not fit: ")
    small = 1.01 * kinds["full"]
    assert small < total / (1 + MEMORY_ERROR)
    kind = re.search(r"With --recompute (\w+), it needs ([\d.]+) GB", advice(small))
    assert kind is not None and kind[1] == "full" and float(kind[2]) == pytest.approx(kinds["full"], abs=0.06)
    assert "plan search" in advice(0.5 * kinds["full"])


# ---- Loads of experts: the rank with the most in each step decides; memory is that of all steps ----


BASE = Workload(read_shape("qwen3-30b-a3b"), load_device("h100"), layout_of(32, 1, 4, 1, 8), global_batch=256, host=0.0)
LAYERS, EXPERTS, RANKS = 48, 128, 8
ON_64 = Workload(
    read_shape("deepseek-v3"), load_device("h800"), layout_of(64, pp=1, ep=64), global_batch=64, ep_backend="deepep"
)


def with_loads(rows, load=BASE, layers=None, maxima=None, **options):
    maxima = maxima or [1.0] * len(rows)
    measured = MeasuredLoads("loads.json", tuple(layers or range(len(rows))), tuple(map(tuple, rows)), tuple(maxima))
    return dataclasses.replace(load, loads=measured, **options)


def uneven(seed=0, layers=LAYERS, experts=EXPERTS):
    choose = random.Random(seed)
    return [[choose.randint(1, 1000) for _ in range(experts)] for _ in range(layers)]


@pytest.mark.parametrize("number", [7, 0.1, 10**12])
@pytest.mark.parametrize("options", [{}, {"schedule": "dualpipe"}, {"schedule": "zb1p", "recompute": "full"}], ids=str)
def test_equal_loads_are_exactly_the_balanced_estimate(number, options):
    balanced = dataclasses.replace(BASE, **options)
    equal = with_loads([[number] * EXPERTS] * LAYERS, balanced)
    assert step_of(equal) == step_of(balanced) and memory_of(equal) == memory_of(balanced)


@pytest.mark.parametrize("seed", range(6))
def test_without_changes_between_steps_a_factor_is_the_imbalance_of_the_placement(seed):
    rng = random.Random(seed)
    ep, each, copies = rng.choice([2, 3, 8]), rng.choice([2, 5]), rng.choice([0, 1, 2])
    loads = uneven(seed, 3, ep * each)
    for placement in (in_order(3, ep * each, ep), place_experts(loads, ep * (each + copies), ep)):
        expected = imbalance(placement.gpu_loads(loads))
        rows = zip(loads, placement.experts, strict=True)
        assert [max_over_mean(tuple(load_E), 1.0, slots, ep) for load_E, slots in rows] == pytest.approx(expected)


@pytest.mark.parametrize("tokens,skew", [(100, 0.0), (400, 0.4), (3000, 1.0)])
def test_the_mean_over_steps_follows_from_the_sum_and_the_mean_of_the_largest_expert(tokens, skew):
    """In random steps, the maximum of the sum is too small; what the file has gives the mean over steps for any number
    of ranks and any placement."""
    rng = np.random.default_rng(1)
    share_E = np.exp(skew * rng.standard_normal(16))
    steps_NE = rng.multinomial(tokens, share_E / share_E.sum(), size=400) * np.exp(0.2 * rng.standard_normal((400, 16)))
    load_E = tuple(steps_NE.sum(0))
    highest = (steps_NE.max(1) / steps_NE.mean(1)).mean()
    for slots, ep in [(tuple(range(16)), 16), (tuple(range(16)), 4), (tuple(range(16)), 2),
                      (place_experts([load_E], 16, 4).experts[0], 4)]:  # fmt: skip
        ranks_NR = steps_NE[:, list(slots)].reshape(400, ep, -1).sum(2)
        measured = (ranks_NR.max(1) / ranks_NR.mean(1)).mean()
        assert max_over_mean(load_E, highest, slots, ep) == pytest.approx(measured, rel=0.03)
        assert max_over_mean(load_E, 1.0, slots, ep) <= measured


def test_assumed_loads_have_the_given_violation_and_are_more_even_over_fewer_ranks():
    assert assumed_factor(64, 8, 1, 0.5) == assumed_factor(0, 0, 8, 0.5) == assumed_factor(64, 8, 16, 0.0) == 1.0
    for violation in (0.1, 0.5, 2.0):
        assert assumed_factor(64, 4, 64, violation) == pytest.approx(1 + violation, rel=2e-3)
        factors = [assumed_factor(64, 4, ep, violation) for ep in (1, 2, 8, 32, 64)]
        assert factors == sorted(factors) and len({*factors}) == 5
    assert assumed_factor(4, 2, 4, 9.0) == pytest.approx(2.0, rel=2e-3)  # a token chooses an expert at most once


def test_only_layers_with_experts_have_loads():
    """DeepSeek-ON_64 has three dense layers: numbers of layers tell, or else the order."""
    rows = [[1 + layer] + [1] * 255 for layer in range(58)]
    by_number = layer_factors(with_loads(rows, ON_64, range(3, 61)))
    assert by_number[:3] == [1.0] * 3
    assert by_number[3:] == pytest.approx([(layer + 4) * 64 / (256 + layer) for layer in range(58)])
    assert layer_factors(with_loads(rows, ON_64)) == by_number
    assert layer_factors(with_loads([[9] * 256, *rows], ON_64, range(2, 61))) == by_number  # of another kind of model


def test_the_table_compares_places_numbers_of_ranks_and_limits_of_the_router():
    ways = dict(routings(with_loads(uneven(2, 1, 256) * 58, ON_64, range(3, 61), [4.0] * 58)))
    assert [*ways] == [
        "as given", "moved", "moved, with 1 copy on each GPU", "moved, with 2 copies on each GPU", "in order, --ep 32",
        "tokens go to any node", "all experts alike",
    ]  # fmt: skip
    found = {name: (estimate(load).imbalance, step_of(load).seconds) for name, load in ways.items()}
    moved = [found[name][0] for name in [*ways][:4]]
    assert moved == sorted(moved, reverse=True) and moved[0] > 1.1 * moved[1] and found["all experts alike"][0] == 1
    seconds = [found[name][1] for name in [*ways][:4]] + [found["all experts alike"][1]]
    assert seconds == sorted(seconds, reverse=True)
    assert found["tokens go to any node"][1] > found["as given"][1]
    for row in ways["moved"].experts.experts:  # a group of experts stays on its node
        assert all(len({expert // 32 for expert in row[node * 32 :][:32]}) == 1 for node in range(8))
    copies = Counter(Counter(ways["moved, with 1 copy on each GPU"].experts.experts[0]).values())
    assert sum(number * experts for number, experts in copies.items()) == 256 + 64
    free = dataclasses.replace(BASE, layout=layout_of(32, ep=16), ep_backend="deepep")
    names = [name for name, _ in routings(free)]
    assert names == ["as given", "in order, --ep 8", "in order, --ep 32", "tokens go to at most 1 node",
                     "all experts alike"]  # fmt: skip


# ---- Memory ----


def of_ranks(rows):
    """For each layer, the load of each of 8 ranks, whose experts have equal shares."""
    return with_loads([[load for load in row for _ in range(EXPERTS // RANKS)] for row in rows])


def test_the_most_loaded_rank_is_the_one_that_gets_the_most_over_all_layers():
    rows = uneven(0, LAYERS, RANKS)
    most = max(sum(row[rank] * RANKS / sum(row) for row in rows) / LAYERS for rank in range(RANKS))
    batch = MicroBatch(1, 4096, ep=RANKS, load=most)
    schedule, stages = full_schedule("1f1b", 4, 32), BASE.stages
    expected = max(rank.total for rank in peak_memory(BASE.shape, schedule, batch, stages, 8))
    assert expected > memory_of(BASE).total and memory_of(of_ranks(rows)).total == pytest.approx(expected, rel=1e-9)
    # In every layer, one rank has the largest load; but if ranks take turns, their sums are equal.
    turns = [[13 if rank == layer % RANKS else 10 for rank in range(RANKS)] for layer in range(LAYERS)]
    assert memory_of(of_ranks(turns)).total == pytest.approx(memory_of(BASE).total, rel=1e-9)


# ---- Files ----


WRONG = {
    "experts": ([[1] * 64] * LAYERS, BASE, "has loads of 64 experts, and qwen3-30b-a3b has 128"),
    "layers": ([[1] * EXPERTS] * 3, BASE, "has loads of 3 layers, and qwen3-30b-a3b has 48 layers with experts"),
    "dense": ([[1] * 8], dataclasses.replace(BASE, shape=read_shape("llama3-8b"), layout=layout_of(32, 1, 4)),
              "has loads of 8 experts, and llama3-8b has 0"),
}  # fmt: skip


@pytest.mark.parametrize("rows, load, said", WRONG.values(), ids=WRONG)
def test_loads_of_another_model_are_refused(rows, load, said):
    with pytest.raises(ValueError, match=said) as error:
        with_loads(rows, load).check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text, said", [
    ('{"loads": [[1, -2]]}', "finite numbers of at least 0"), ('{"loads": [[1, 2], [1]]}', "the same number"),
    ('{"loads": [[1, 1e999]]}', "cannot read"), ('{"loads": []}', "at least one layer"), ("[1]", "Expected `object`"),
    ('{"loads": [["1"]]}', "Expected `float`"), ('{"loads": [[1]], "maxima": [1, 2]}', '"maxima" in'),
])  # fmt: skip
def test_files_without_loads_are_refused(tmp_path, text, said):
    (tmp_path / "loads.json").write_text(text)
    with pytest.raises(ValueError, match=said) as error:
        MeasuredLoads.read(tmp_path / "loads.json")
    assert "loads.json" in str(error.value) and "\n" not in str(error.value)
