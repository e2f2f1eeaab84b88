"""Plans with measured loads of experts: equal loads change nothing, and the fullest rank decides."""

import dataclasses
import random

import pytest

from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.measured_loads import MeasuredLoads
from moe_dualpipe.tools.planner.prediction import estimate
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.segment_times import layer_factors
from moe_dualpipe.tools.planner.step import step_of
from moe_dualpipe.tools.planner.workload import Workload, layout_of

BASE = Workload(read_shape("qwen3-30b-a3b"), load_device("h100"), layout_of(32, 1, 4, 1, 8), global_batch=256, host=0.0)
LAYERS, EXPERTS = len(BASE.shape.layers), 128
V3 = Workload(read_shape("deepseek-v3"), load_device("h800"), layout_of(64, pp=1, ep=64), global_batch=64)


def measured(rows, layers=None):
    return MeasuredLoads("loads.json", tuple(layers or range(len(rows))), tuple(map(tuple, rows)))


def with_loads(rows, load=BASE, layers=None, **options):
    return dataclasses.replace(load, loads=measured(rows, layers), **options)


def uneven(seed=0):
    choose = random.Random(seed)
    return [[choose.randint(1, 1000) for _ in range(EXPERTS)] for _ in range(LAYERS)]


@pytest.mark.parametrize("number", [7, 0.1, 10**12])
@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe"])
def test_equal_loads_are_exactly_the_balanced_estimate(number, schedule):
    balanced = dataclasses.replace(BASE, schedule=schedule)
    assert step_of(with_loads([[number] * EXPERTS] * LAYERS, balanced)) == step_of(balanced)


def test_where_experts_are_within_a_rank_changes_nothing_but_between_ranks_it_does():
    rows, choose, each = uneven(), random.Random(1), EXPERTS // 8
    within = []
    for row in rows:
        parts = [choose.sample(row[start : start + each], each) for start in range(0, EXPERTS, each)]
        choose.shuffle(parts)  # which rank is the fullest does not matter either
        within.append([load for part in parts for load in part])
    assert within != rows and step_of(with_loads(within)) == step_of(with_loads(rows))
    assert step_of(with_loads([sorted(row) for row in rows])).seconds > step_of(with_loads(rows)).seconds


def test_the_stage_with_the_uneven_layer_slows_the_pipeline_down():
    """A layer on one stage costs more than its own time: all stages wait for the slowest."""
    rows = [[10] * EXPERTS for _ in range(LAYERS)]
    spread = [[*row] for row in rows]
    for layer in range(4):
        rows[layer][0] += 1280  # all on the first of 4 stages
        spread[layer * 12][0] += 1280  # one on each
    assert step_of(with_loads(rows)).seconds > step_of(with_loads(spread)).seconds > step_of(BASE).seconds


def test_only_layers_with_experts_have_loads():
    """DeepSeek-V3 has three dense layers: numbers of layers tell, or else the order."""
    rows = [[1 + layer] + [1] * 255 for layer in range(58)]
    by_number = layer_factors(with_loads(rows, V3, range(3, 61)))
    assert by_number[:3] == [1.0] * 3 and by_number[3:] == [(layer + 4) * 64 / (256 + layer) for layer in range(58)]
    assert layer_factors(with_loads(rows, V3)) == by_number
    more = layer_factors(with_loads([[9] * 256, *rows], V3, range(2, 61)))  # a block of another kind of model
    assert more == by_number


def test_the_report_says_how_uneven_loads_are():
    report = estimate(with_loads([[2] + [1] * 127] * LAYERS)).as_dict()
    assert report["expert_imbalance"] == pytest.approx(17 * 8 / 129)
    assert estimate(BASE).as_dict()["expert_imbalance"] == 1.0


WRONG = {
    "experts": ([[1] * 64] * LAYERS, BASE, "has loads of 64 experts, and qwen3-30b-a3b has 128"),
    "layers": ([[1] * EXPERTS] * 3, BASE, "has loads of 3 layers, and qwen3-30b-a3b has 48 layers with experts"),
    "dense": ([[1] * 8], dataclasses.replace(BASE, shape=read_shape("llama3-8b"), layout=layout_of(32, 1, 4)),
              "llama3-8b has no experts"),
}  # fmt: skip


@pytest.mark.parametrize("rows, load, said", WRONG.values(), ids=WRONG)
def test_loads_of_another_model_are_refused(rows, load, said):
    with pytest.raises(ValueError) as error:
        with_loads(rows, load).check()
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text, said", [
    ('{"loads": [[1, -2]]}', "finite numbers of at least 0"),
    ('{"loads": [[1, 2], [1]]}', "the same number of experts"),
    ('{"loads": [[1, 1e999]]}', "cannot read"), ('{"loads": []}', "at least one layer"), ("[1]", '"loads"'),
    ('{"loads": [[1e305]]}', "finite numbers"), ('{"loads": [["1"]]}', '"loads"'),
])  # fmt: skip
def test_files_without_loads_are_refused(tmp_path, text, said):
    (tmp_path / "loads.json").write_text(text)
    with pytest.raises(ValueError) as error:
        MeasuredLoads.read(tmp_path / "loads.json")
    assert said in str(error.value) and "loads.json" in str(error.value) and "\n" not in str(error.value)
