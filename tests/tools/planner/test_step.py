"""The predicted step: parts add up, effects only add time, and shortcuts equal what they replace."""

import dataclasses
import itertools

import pytest

from moe_dualpipe.schedule import Costs, build, simulate
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.peak import stages_of
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.segment_times import EFFECTS
from moe_dualpipe.tools.planner.step import simulate_step, step_of
from moe_dualpipe.tools.planner.workload import Workload, layout_of
from tests.support.planned import relaid

QWEN = Workload(read_shape("qwen3-30b-a3b"), load_device("h100"), layout_of(32, 1, 4, 1, 8), global_batch=256, host=0.0)


def changed(load=QWEN, layout=None, **options):
    return dataclasses.replace(load, layout=relaid(load.layout, **(layout or {})), **options)


def test_a_step_of_one_gpu_without_effects_is_its_flops_at_the_peak():
    load = changed(layout={"gpus": 1, "pp": 1, "ep": 1}, global_batch=4)
    shape, peak = load.shape, load.device.peak["bf16"]
    assert peak is not None
    seconds = step_of(load, frozenset()).seconds
    # Attention's backward has 5 products, not 4: 2.5 forwards instead of 2.
    flops = load.tokens * (shape.train_flops(load.seq) + 0.5 * shape.score_flops(load.seq))
    assert seconds == pytest.approx(flops / peak, rel=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "dualpipe", "dualpipev"])
def test_each_effect_adds_time(schedule):
    load = changed(schedule=schedule, recompute="full", routing="real", overlap=False)
    load = changed(load, {"tp": 2})
    on, before = frozenset(), 0.0
    load = changed(load, host=1e-3)
    for effect in ("", *EFFECTS):
        on = on | {effect}
        step = step_of(load, on)
        assert step.seconds > before, effect
        assert min(step.compute, step.exposed, step.idle, step.sums, step.optimizer) >= 0
        before = step.seconds
    assert step_of(load).seconds == before


def test_overlap_never_costs_time_and_hides_transfers():
    for layout, backend in itertools.product(({}, {"pp": 1}, {"ep": 32, "pp": 1}), ("all_to_all", "deepep")):
        load = changed(layout=layout, ep_backend=backend)
        alone, overlapped = step_of(changed(load, overlap=False)), step_of(changed(load, overlap=True))
        assert overlapped.seconds < alone.seconds
        assert overlapped.hidden > alone.hidden >= 0 and overlapped.transfers == alone.transfers


def test_without_an_option_only_schedules_of_pairs_overlap():
    for schedule, overlaps in {"1f1b": False, "zb1p": False, "dualpipe": True, "dualpipev": True}.items():
        load = changed(schedule=schedule)
        assert step_of(load) == step_of(changed(load, overlap=overlaps)) != step_of(changed(load, overlap=not overlaps))


def test_no_transfers_without_expert_parallelism():
    load = changed(layout={"gpus": 1, "pp": 1, "ep": 1}, overlap=True)
    step = step_of(load)
    assert (step.transfers, step.exposed, step.sums, step.idle, step.hidden) == (0, 0, 0, 0, 1)


def test_real_routing_deduplication_and_recomputation_have_the_right_sign():
    base = step_of(changed(overlap=False)).seconds
    assert step_of(changed(overlap=False, routing="real")).seconds > base
    assert step_of(changed(overlap=False, ep_backend="deepep")).seconds < base
    times = [step_of(changed(recompute=kind)).seconds for kind in ("none", "norms", "attention", "full")]
    assert times == sorted(times) and len({*times}) == 4
    assert step_of(changed(precision="fp8")).seconds < step_of(changed()).seconds
    assert step_of(changed(attention="plain")).seconds > step_of(changed()).seconds
    assert step_of(changed(attention="flash2")).seconds > step_of(changed()).seconds


SCHEDULES = ["1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipe", "dualpipev"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_extrapolated_step_equals_the_simulated_one(schedule):
    load = changed(schedule=schedule, layout={"vpp": 2 if schedule == "interleaved_1f1b" else 1})
    stages = load.placement.num_stages
    costs = Costs(
        tuple(1 + 0.1 * (s % 3) for s in range(stages)), tuple(2 + 0.15 * (s % 2) for s in range(stages)),
        (1.0,) * stages, tuple(2.8 + 0.1 * (s % 3) for s in range(stages)), comm=0.05,
    )  # fmt: skip
    for number in (32, 40, 64, 96):
        exact = simulate(build(schedule, 4, number, load.layout.chunks), costs).makespan
        assert simulate_step(load, number, costs) == pytest.approx(exact, rel=0.01)


@pytest.mark.parametrize("layers,pp", [(48, 4), (48, 5), (48, 25), (46, 8), (48, 50), (47, 49), (61, 16)])
@pytest.mark.parametrize("mtp", [0, 2])
def test_every_layer_is_on_one_stage_in_order(layers, pp, mtp):
    shape = dataclasses.replace(QWEN.shape, layers=QWEN.shape.layers[:1] * layers, mtp=mtp)
    stages = stages_of(shape, pp)
    assert [i for stage in stages for i in stage.layers] == [*range(layers + mtp)]
    assert [stage.embedding for stage in stages] == [True] + [False] * (pp - 1)
    assert [stage.head for stage in stages] == [False] * (pp - 1) + [True]
    if layers % pp == 0:
        assert {len(stage.layers) for stage in stages[:-1]} == {layers // pp}
    elif mtp == 0:
        assert max(len(stage.layers) for stage in stages) <= -(-layers // pp) + 1
