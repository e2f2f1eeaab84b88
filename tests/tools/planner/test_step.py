"""The predicted step: parts add up, effects only add time, and shortcuts equal what they replace."""

import dataclasses
import itertools

import pytest

from moe_dualpipe.schedule import Costs, build, simulate
from moe_dualpipe.tools.planner.device import load_device
from moe_dualpipe.tools.planner.peak import memory_of, stages_of
from moe_dualpipe.tools.planner.published_shapes import read_shape
from moe_dualpipe.tools.planner.routing import MeasuredLoads
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
    load = changed(schedule=schedule, recompute="full", violation=0.4, overlap=False)
    load = changed(load, {"tp": 2}, host=1e-3)
    on, before = frozenset(), 0.0
    for effect in ("", *EFFECTS):
        on = on | {effect}
        step = step_of(load, on)
        assert step.seconds > before, effect
        assert min(step.compute, step.exposed, step.idle, step.sums, step.optimizer) >= 0
        before = step.seconds
    assert step_of(load).seconds == before


WORKLOADS = {
    "tensor, context and expert parallelism": changed(
        layout={"gpus": 64, "tp": 2, "cp": 2, "ep": 4}, schedule="zb1p", precision="fp8", ep_backend="deepep",
        recompute="attention", violation=0.35),
    "dualpipe": changed(schedule="dualpipe", recompute="norms", host=7e-5),
    "no experts": Workload(
        read_shape("llama3-8b"), load_device("b200"), layout_of(64, tp=4), global_batch=256, zero=False,
        precision="mxfp8", attention="plain", recompute="full", host=0.0),
    "loads, multi-token prediction": Workload(
        dataclasses.replace(read_shape("deepseek-v3"), mtp=1), load_device("h800"), layout_of(128, pp=4, vpp=2, ep=32),
        8192, global_batch=256, schedule="interleaved_1f1b", ep_backend="hybrid", overlap=True, attention="flash2",
        cuda_graphs="partial", host=7e-5,
        loads=MeasuredLoads("", tuple(range(58)), (tuple(range(1, 257)),) * 58, (3.0,) * 58)),
}  # fmt: skip
GOLDEN = {
    "tensor, context and expert parallelism": (
        [1842.073, 126.6157, 237.2657, 75.2944, 4.854794, 228.591],
        [6247104000, 8329472000, 5841460992, 4043542016, 1257242624],
    ),
    "dualpipe": (
        [2870.134, 774.794, 139.7184, 0.5774635, 19.41918, 788.6697],
        [5787303936, 11574607872, 11682920448, 23373033984, 5028970496],
    ),
    "no experts": (
        [1402.136, 0.0, 0.0, 62.79679, 8.856906, 132.9036],
        [6022695936, 8030261248, 24090783744, 1079005184, 1050673152],
    ),
    "loads, multi-token prediction": (
        [14036.08, 2092.631, 2922.235, 8.130043, 54.27168, 6112.135],
        [21743173632, 43486347264, 61243422720, 477305872960, 4145277972],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKLOADS)
def test_predictions_change_only_on_purpose(name):
    """The parts of a step, in milliseconds, and of the memory, in bytes. Whoever changes a formula on purpose changes
    these numbers, and says in the change by how much the score of the published runs changes."""
    load = WORKLOADS[name]
    load.check()
    seconds, memory = GOLDEN[name]
    assert [1e3 * part for part in dataclasses.astuple(step_of(load))] == pytest.approx(seconds, rel=1e-5)
    assert [*memory_of(load).parts().values()] == memory


def test_overlap_never_costs_time_and_hides_transfers():
    for layout, backend in itertools.product(({}, {"pp": 1}, {"ep": 32, "pp": 1}), ("all_to_all", "deepep")):
        load = changed(layout=layout, ep_backend=backend)
        alone, overlapped = step_of(changed(load, overlap=False)), step_of(changed(load, overlap=True))
        assert overlapped.seconds < alone.seconds and alone == step_of(load)
        pairs = changed(load, schedule="dualpipev")
        assert step_of(pairs) == step_of(changed(pairs, overlap=True)) != step_of(changed(pairs, overlap=False))
        assert overlapped.hidden > alone.hidden >= 0 and overlapped.transfers == alone.transfers


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
