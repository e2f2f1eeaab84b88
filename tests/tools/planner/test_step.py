"""The predicted step: its parts equal hand arithmetic, effects only add time, shortcuts equal what they replace."""

import dataclasses
import itertools
import math
import random

import pytest

from moe_dualpipe.models import preset
from moe_dualpipe.models.attention import attention_costs
from moe_dualpipe.models.costs import shape_of
from moe_dualpipe.overlap.pair_time import pair_seconds
from moe_dualpipe.schedule import Costs, build, simulate
from moe_dualpipe.tools.planner import Workload, layout_of, load_device, read_shape
from moe_dualpipe.tools.planner.device import gather
from moe_dualpipe.tools.planner.routing import MeasuredLoads, all_to_all, rows_sent
from moe_dualpipe.tools.planner.segment_times import ALL, EFFECTS, Clock, head_seconds, layer_seconds
from moe_dualpipe.tools.planner.stages import memory_of
from moe_dualpipe.tools.planner.step import (
    OVERLAP,
    TRANSFER_SHARE,
    layer_costs,
    simulate_step,
    step_of,
)  # fmt: skip
from moe_dualpipe.tools.planner.workload import stages_of
from tests.support.planned import changed

QWEN = Workload(read_shape("qwen3-30b-a3b"), load_device("h100"), layout_of(32, 1, 4, 1, 8), global_batch=256, host=0.0)


def test_a_step_of_one_gpu_without_effects_is_its_flops_at_the_peak():
    load = changed(QWEN, layout={"gpus": 1, "pp": 1, "ep": 1}, global_batch=4)
    shape, peak = load.shape, load.device.peak["bf16"]
    assert peak is not None
    seconds = step_of(load, frozenset()).seconds
    # Attention's backward has 5 products, not 4: 2.5 forwards instead of 2.
    flops = load.tokens * (shape.train_flops(load.seq) + 0.5 * shape.score_flops(load.seq))
    assert seconds == pytest.approx(flops / peak, rel=1e-6)


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "dualpipe", "dualpipev"])
def test_each_effect_adds_time(schedule):
    load = changed(QWEN, schedule=schedule, recompute="full", violation=0.4, overlap=False)
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
        QWEN, layout={"gpus": 64, "tp": 2, "cp": 2, "ep": 4}, schedule="zb1p", precision="fp8", ep_backend="deepep",
        recompute="attention", violation=0.35),
    "dualpipe": changed(QWEN, schedule="dualpipe", recompute="norms", host=7e-5),
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
        [1934.233, 126.6157, 241.5857, 74.1424, 4.854794, 228.591],
        [6247104000, 8329472000, 5841460992, 4043542016, 1257242624],
    ),
    "dualpipe": (
        [4480.608, 777.1204, 206.773, 0.5774635, 19.41918, 788.6697],
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
        load = changed(QWEN, layout=layout, ep_backend=backend)
        alone, overlapped = step_of(changed(load, overlap=False)), step_of(changed(load, overlap=True))
        assert overlapped.seconds < alone.seconds and alone == step_of(load)
        pairs = changed(load, schedule="dualpipev")
        assert step_of(pairs) == step_of(changed(pairs, overlap=True)) != step_of(changed(pairs, overlap=False))
        assert overlapped.hidden > alone.hidden >= 0 and overlapped.transfers == alone.transfers


SCHEDULES = ["1f1b", "interleaved_1f1b", "zb1p", "zbv", "dualpipe", "dualpipev"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_extrapolated_step_equals_the_simulated_one(schedule):
    load = changed(QWEN, schedule=schedule, layout={"vpp": 2 if schedule == "interleaved_1f1b" else 1})
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
    assert [i for stage in stages for i in stage.blocks] == [*range(layers + mtp)]
    assert [stage.embedding for stage in stages] == [True] + [False] * (pp - 1)
    assert [stage.head for stage in stages] == [False] * (pp - 1) + [True]
    if layers % pp == 0:
        assert {len(stage.layers) for stage in stages} == {layers // pp}
    elif mtp == 0:
        assert max(len(stage.layers) for stage in stages) <= -(-layers // pp) + 1


# ---- Parts by hand arithmetic: gradients, optimizer, overlap in schedules without pairs, and the head ----


H100 = load_device("h100")
LOAD = Workload(read_shape("qwen3-30b-a3b"), H100, layout_of(32, 1, 4, 1, 4), global_batch=256, host=0.0)
DENSE = Workload(read_shape("llama3-8b"), H100, layout_of(8), global_batch=64, host=0.0)


def test_a_micro_batch_on_one_rank_is_its_layers_and_its_head():
    """Nothing waits: a step is the sum of all segments. A module of multi-token prediction adds a block and a head."""
    load = changed(DENSE, {"gpus": 1}, global_batch=3)
    one = [layer_seconds(load, layer) for layer in load.shape.layers]
    head = head_seconds(load)
    expected = 3 * sum(layer.seconds_f + layer.seconds_b for layer in (*one, head))
    assert step_of(load).compute == pytest.approx(expected)
    more = step_of(changed(load, shape=dataclasses.replace(load.shape, mtp=2))).compute
    assert more == pytest.approx(expected + 6 * sum(layer.seconds_f + layer.seconds_b for layer in (one[-1], head)))


def test_overlap_on_one_rank_hides_its_share_of_what_the_order_allows():
    """The forward of the first micro-batch and the backward of the last have nothing beside them: 15 pairs of 16."""
    load = changed(LOAD, layout={"gpus": 4, "pp": 1}, global_batch=64, overlap=True)
    layers = [layer_seconds(load, layer) for layer in load.shape.layers] + [head_seconds(load)]
    alone = sum(layer.seconds_f + layer.seconds_b for layer in layers)
    gain = OVERLAP * (alone - pair_seconds(layers, layers, TRANSFER_SHARE["all_to_all"] / H100.sms))
    plain, step = step_of(changed(load, overlap=False)), step_of(load)
    assert plain.seconds - plain.sums - step.seconds + step.sums == pytest.approx(15 * gain) and gain > 0


# ---- Segments ----


def test_a_narrow_head_has_as_many_exponentials_as_a_wide_one():
    """So the same FLOPs in heads of 64 take longer than in heads of 128, but less than twice as long."""
    layer, seconds = DENSE.shape.layers[0], []
    wide = layer.attention
    narrow = dataclasses.replace(wide, heads=2 * wide.heads, kv_heads=2 * wide.kv_heads, qk_dim=64, v_dim=64)
    for attention in (wide, narrow):
        changed_layer = dataclasses.replace(layer, attention=attention)
        real, ideal = (layer_seconds(DENSE, changed_layer, frozenset(on)).attn_f for on in (["attention"], []))
        seconds.append(real - ideal + 4096 * wide.score_flops(4096) / DENSE.peak)
    assert seconds[1] == pytest.approx(2**0.5 * seconds[0])


def test_without_a_kernel_for_all_experts_each_product_has_the_curve_of_a_small_one():
    clock = Clock(load_device("b200"), "mxfp8", ALL)
    one, fused = (clock.grouped(64e9, 64, fused) for fused in (False, True))
    assert one == 64 * clock.product(1e9) > fused == clock.product(64e9, kind="grouped")


@pytest.mark.parametrize("gpu,options,sizes", [
    ("h100", {"ep_backend": "all_to_all"}, (4096, 4096, 4096)),
    ("h100", {"ep_backend": "all_to_all", "precision": "fp8"}, (4096, 4096, 4096)),
    ("h100", {}, (4096, 4096, 4096)),
    ("h100", {"precision": "fp8"}, (2048 + 64, 4096, 4096)),
    ("h100", {"fp8": "experts"}, (4096, 4096, 4096)),
    ("h100", {"fp8": "experts+dispatch"}, (2048 + 16, 4096, 2048 + 16)),
    ("b200", {"fp8": "experts+dispatch"}, (2048 + 64, 4096, 2048 + 64)),
])  # fmt: skip
def test_bytes_of_transfers_of_experts(gpu, options, sizes):
    """Rows of 2,048 numbers in 16 bits, or in 8 bits with a scale for each 32 numbers, or 128 for experts in FP8 on
    Hopper. sizes: of dispatch and combine, and of the gradients of outputs. NCCL also copies both sides."""
    options = {"ep_backend": "deepep"} | options
    load = changed(LOAD, {"pp": 1, "gpus": 16, "ep": 16}, device=load_device(gpu), **options)
    device, layer = load.device, load.shape.layers[0]
    rows = rows_sent(128, 8, 16, device.domain.gpus or 1, load.ep_backend)
    copies = 4 * 4096 * (rows.near + rows.far) * 4096 / device.passes if load.ep_backend == "all_to_all" else 0
    for factor in (1, 1.5):  # the rank with the most rows has 1.5 times the mean
        one = layer_seconds(load, layer, factor=factor)
        dispatch, combine, back = (all_to_all(device, rows, factor * 4096, size) + factor * copies for size in sizes)
        transfers = one.dispatch_f, one.combine_f, one.combine_b, one.dispatch_b
        assert transfers == pytest.approx((dispatch, combine, back, combine))
    assert one.mlp_f > layer_seconds(load, layer).mlp_f


@pytest.mark.parametrize("model,width,up", [
    ("qwen3-30b-a3b", 2 * 4 * 128, 0), ("deepseek-v3", 512 + 64, 512 * 128 * (128 + 128)),
])  # fmt: skip
def test_keys_are_a_transfer_of_a_pair(model, width, up):
    """4 heads of keys and values, or the latent and the rotated key. From latents, each rank computes the keys and
    values of all positions, those of 3 other ranks too."""
    ours = Workload(read_shape(model), H100, layout_of(16, ep=8, cp=4), global_batch=64, schedule="dualpipev", host=0.0)
    layer = ours.shape.layers[-1]
    once, twice = (layer_seconds(changed(ours, recompute=recompute), layer) for recompute in ("none", "full"))
    assert once.keys_f == once.keys_b == twice.keys_b == pytest.approx(gather(H100, 2 * 4096 * width, 4, 1))
    assert 0 < once.qkv_f == once.qkv_w == once.qkv_b == pytest.approx(twice.qkv_b / 2)
    assert twice.attn_b == pytest.approx(once.attn_b + once.attn_f)
    pairs, ring = (layer_seconds(load, layer, frozenset()) for load in (ours, changed(ours, overlap=False)))
    more = 3 * 1024 * 2 * up / H100.peak["bf16"]
    assert pairs.seconds_f - ring.seconds_f == pytest.approx(more)
    assert pairs.seconds_b - ring.seconds_b == pytest.approx(2 * more)


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v3"])
def test_the_order_of_a_pair_is_that_of_the_model(name):
    """`gathered` is what the layers gather."""
    config = preset(name)
    numbers = math.prod(attention_costs(config).kv_cache_shape(config))
    assert shape_of(config).layers[-1].attention.gathered == numbers
    load = Workload(shape_of(config), H100, layout_of(16, ep=8, cp=4), schedule="dualpipev")
    assert load.opens == (0 if name == "olmoe-1b-7b" else 2) and changed(load, overlap=False).opens == 1


def test_only_pairs_of_this_project_hide_keys_behind_the_other_micro_batch():
    load = changed(LOAD, {"cp": 4}, schedule="dualpipev")
    layer = load.shape.layers[0]
    rings = [changed(load, overlap=False), changed(load, schedule="interleaved_1f1b", overlap=True)]
    for ring in rings:  # 0.4 of the gather beside each forward, and twice as much in a backward
        keys, no_keys = (layer_seconds(ring, layer, on) for on in (ALL, ALL - {"tensor transfers"}))
        assert [keys.attn_f - no_keys.attn_f, keys.attn_b - no_keys.attn_b] == pytest.approx(
            [0.4 * layer_seconds(load, layer).keys_f, 0.8 * layer_seconds(load, layer).keys_f]
        )
    one = layer_seconds(load, layer)
    alone, pair = one.seconds_f + one.seconds_b, pair_seconds([one], [one], 20 / H100.sms, load.opens)
    assert layer_costs(load)[0] == pytest.approx(alone - OVERLAP * (alone - pair)) and load.opens == 2
    slow = dataclasses.replace(H100, domain=dataclasses.replace(H100.domain, bandwidth=2e9))
    exposed, hidden = (step_of(changed(load, device=slow, overlap=overlap)).hidden for overlap in (False, True))
    assert exposed < hidden < 1


def test_experts_in_fp8_multiply_faster_but_for_weight_gradients():
    """Nothing else does: without memory, launches and transfers, the rest of a layer takes as long as before."""
    on, layer = frozenset({"products"}), LOAD.shape.layers[0]
    plain, fp8, everything = (
        layer_seconds(changed(LOAD, **options), layer, on) for options in ({}, {"fp8": "experts"}, {"precision": "fp8"})
    )
    same = ("attn_f", "attn_b", "attn_w", "mlp_w")
    assert [getattr(fp8, name) for name in same] == [getattr(plain, name) for name in same]
    saved = plain.mlp_f - fp8.mlp_f
    assert saved > 0 and plain.mlp_b - fp8.mlp_b == pytest.approx(saved)
    assert fp8.mlp_f == pytest.approx(everything.mlp_f)  # without shared experts, only the router is in bf16


def test_experts_in_fp8_round_rows_in_each_micro_batch_and_weights_in_each_step():
    """128 experts of 3 x 2,048 x 768 weights over 4 ranks, rounded for both products. Rounding moves 3 bytes."""
    layer, on = LOAD.shape.layers[0], frozenset({"memory"})
    plain, fp8 = (changed(LOAD, fp8=fp8) for fp8 in ("off", "experts"))
    more = layer_seconds(fp8, layer, on).mlp_f - layer_seconds(plain, layer, on).mlp_f
    products = layer_seconds(fp8, layer, frozenset()).mlp_f - layer_seconds(plain, layer, frozenset()).mlp_f
    assert more - products == pytest.approx(3 * 4096 * (2048 + 8 * 768) / H100.passes)
    weights = 12 * 32 * 3 * 2048 * 768  # of a rank with a quarter of the layers
    assert step_of(fp8).optimizer - step_of(plain).optimizer == pytest.approx(2 * 3 * weights / H100.passes)


def test_biases_of_experts_are_added_expert_by_expert_in_fp32():
    """Of an output, a forward moves 28 bytes and a backward 40; of a first product's gradient, a backward moves 2.

    On average over three thirds of a step, of which the backward is two. 4,096 tokens x 8 experts, with outputs of 2 x
    768 and 2,048. A CPU launches 2 kernels for each of 32 local experts, and 6 in the backward.
    """
    layer, on = LOAD.shape.layers[0], frozenset({"memory", "host"})
    load = changed(LOAD, host=1.0)
    plain, biased = (layer_seconds(load, dataclasses.replace(layer, expert_bias=bias), on) for bias in (False, True))
    more = 4096 * 8 * (68 / 3 * 2048 + 4 / 3 * 768) / H100.passes
    assert biased.mlp_f - plain.mlp_f == pytest.approx(more)
    assert biased.mlp_b - plain.mlp_b == pytest.approx(2 * more)
    assert biased.host - plain.host == pytest.approx(32 * 0.2 * (2 + 6) / 3)
    (expected,) = {layer.expert_bias for layer in read_shape("gpt-oss-20b").layers}
    assert expected and not any(layer.expert_bias for layer in LOAD.shape.layers)


def test_a_rank_with_all_experts_only_permutes():
    """Of 128 experts instead of 32, the CPU launches 96 x 0.2 more; 28 launches of the dispatcher become 8."""
    one, four = (changed(LOAD, layout={"ep": ep}, host=1.0) for ep in (1, 4))
    layer = LOAD.shape.layers[0]
    hosts = [layer_seconds(load, layer, frozenset({"host"})).host for load in (one, four)]
    assert hosts[0] - hosts[1] == pytest.approx(96 * 0.2 + 8 - 28)


def test_one_kernel_multiplies_activates_and_rounds_in_mxfp8_with_graphs_of_whole_steps():
    """It writes 2 bytes for each of 768 inner activations of 8 experts, instead of moving 2 x 3 + 4."""
    layer, on = LOAD.shape.layers[0], frozenset({"memory"})
    b200 = load_device("b200")
    moved = {}
    for precision, graphs in itertools.product(("bf16", "mxfp8"), ("partial", "full")):
        load = changed(LOAD, device=b200, precision=precision, cuda_graphs=graphs)
        products = layer_seconds(load, layer, frozenset()).mlp_f
        moved[precision, graphs] = layer_seconds(load, layer, on).mlp_f - products
    assert moved["bf16", "partial"] == pytest.approx(moved["bf16", "full"])
    less = 4096 * 8 * 768 * (10 - 2) / b200.passes
    assert moved["mxfp8", "partial"] - moved["mxfp8", "full"] == pytest.approx(less)


# ---- The pipeline ----


@pytest.mark.parametrize("schedule", ["1f1b", "zb1p", "zbv", "dualpipe", "dualpipev"])
@pytest.mark.parametrize("seed", [0, 42, 48, 56])
def test_no_rank_does_more_work_than_there_is_time(schedule, seed):
    """Also in long steps, which are extrapolated from short ones: the slowest rank may show late."""
    load, choose = changed(LOAD, schedule=schedule), random.Random(seed)
    stages, number = load.placement.num_stages, 400
    forward, backward = ([choose.uniform(1, 4) for _ in range(stages)] for _ in range(2))
    pairs = [choose.uniform(0.7, 1.0) * (f + b) for f, b in zip(forward, backward, strict=True)]
    halves = [0.5 * b for b in backward]
    costs = Costs(tuple(forward), tuple(backward), tuple(halves), tuple(pairs))
    paired = schedule in ("dualpipe", "dualpipev")
    work = pairs if paired else [f + b for f, b in zip(forward, backward, strict=True)]
    share = 0.5 if schedule == "dualpipe" else 1  # half of the micro-batches run in each direction
    least = max(sum(work[s] for s in own) for own in load.placement.stages) * number * share
    assert simulate_step(load, number, costs) >= 0.999 * least


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("graphs,precision,backend,each", [
    ("none", "bf16", "all_to_all", 12 + 22 + 28 + 6.4), ("partial", "bf16", "all_to_all", 12 + 28 + 6.4),
    ("full", "bf16", "all_to_all", 0), ("none", "fp8", "all_to_all", 14 + 22 + 28 + 12.8),
    ("none", "bf16", "deepep", 12 + 22 + 18 + 6.4), ("none", "bf16", "hybrid", 12 + 22 + 8 + 6.4),
])  # fmt: skip
def test_a_slow_cpu_launches_every_kernel_of_a_layer_for_a_forward_and_twice_as_many_for_a_backward(
    schedule, graphs, precision, backend, each
):
    """48 layers of 10 + 2 launches for attention, 22 for experts, those of the dispatcher, and 0.2 for each of 32 local
    experts. In 8 bits, each product has another launch. Partial CUDA graphs replay attention and 10 of the router."""
    load = changed(
        LOAD, layout={"gpus": 4, "pp": 1}, global_batch=12, schedule=schedule, cuda_graphs=graphs, precision=precision,
        ep_backend=backend,
    )  # fmt: skip
    fast, slow = step_of(load), step_of(changed(load, host=1.0))
    assert slow.compute + slow.exposed + slow.idle == pytest.approx(
        3 * 48 * 3 * each if each else fast.compute + fast.exposed + fast.idle, rel=1e-3
    )
    halves = step_of(changed(load, {"gpus": 8, "pp": 2}, schedule="gpipe", host=1.0))
    assert not each or halves.seconds == pytest.approx((3 + 1) * 24 * 3 * each, rel=1e-3)  # F and B are the same share
