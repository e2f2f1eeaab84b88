"""Peak memory: parameters are those of models that are built, published peaks are met, and details of activations."""

import dataclasses
import random
from collections import Counter

import pytest
import torch

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.models import ModelConfig, StageSpec, TransformerStage, split
from moe_dualpipe.models.costs import shape_of
from moe_dualpipe.pipeline.activations import (
    MicroBatch,
    block_bytes,
    deferred_attention,
    deferred_mlp,
    mlp_working,
    rows_received,
    saved_bytes,
    working_bytes,
)
from moe_dualpipe.pipeline.peak_memory import StageBytes, peak_memory, peak_of_actions
from moe_dualpipe.schedule import NAMES, Backward, Forward, Part, build
from moe_dualpipe.tools.planner import read_shape
from moe_dualpipe.tools.planner.published_shapes import published_models
from moe_dualpipe.tools.planner.stages import full_schedule
from moe_dualpipe.tools.planner.workload import stages_of

AWKWARD = ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=9, num_dense_layers=2, num_heads=6, num_kv_heads=3, head_dim=10,
    qk_norm="head", qkv_bias=True, dense_size=7, expert_size=11, num_experts=6, experts_per_token=3,
    num_shared_experts=2, shared_gate=True, router_dtype="float32",
)  # fmt: skip


TIED, MTP = dataclasses.replace(AWKWARD, tied_embeddings=True), dataclasses.replace(AWKWARD, mtp_layers=1)
SPREAD = {"ep": 2, "recompute": "full", "fused_loss": True}


@pytest.mark.parametrize("config,name,ranks,options", [
    (AWKWARD, "dualpipe", 4, SPREAD), (TIED, "dualpipe", 4, {}), (MTP, "1f1b", 3, {"recompute": "norms"}),
    (TIED, "1f1b", 3, SPREAD), (MTP, "dualpipev", 2, SPREAD), (TIED, "1f1b", 1, {}), (AWKWARD, "1f1b", 1, {}),
])  # fmt: skip
def test_ranks_hold_the_parameters_of_their_stages(config, name, ranks, options):
    """Parameters are those of tensors that are built. Replicas share the optimizer state, but divide no tensor."""
    schedule, batch, shape = build(name, ranks, 8), MicroBatch(2, 16, **options), shape_of(config)
    stages, ep = split(config, schedule.num_stages), batch.ep
    divided = peak_memory(shape, schedule, batch, stages, 4)
    (whole, *_) = peak_memory(shape, schedule, batch, stages, 4, zero=False)
    many = peak_memory(shape, schedule, batch, stages, 64, whole_embedding=True)
    for number, rank in enumerate(divided):
        own = schedule.placement.stages[number]
        with torch.device("meta"):
            parts = [TransformerStage(config, stages[s], Loopback(config.num_experts, ep)) for s in own]
        tensors = {key: (p, ".experts." in key) for stage in parts for key, p in stage.named_parameters()}
        held = Counter()
        for p, routed in tensors.values():  # one tied embedding
            held[routed] += p.numel()
        assert (rank.weights, rank.gradients) == (2 * held.total(), 4 * held.total())
        holders = len(schedule.placement.holders(own[0]))
        least = 12 * (held[False] / (4 * holders * 2) + held[True] * ep / (4 * holders))
        assert least <= rank.optimizer < 12 * held.total()
        ends = any(stages[s].embedding or stages[s].head for s in own)
        assert not ends or many[number].optimizer >= 12 * config.vocab_size * config.hidden_size
    assert whole.optimizer == 6 * whole.weights


GIB = 2**30
ZERO_BUBBLE = {"zero": False, "dp": 1}
PEAKS = [
    # arXiv 2401.10241, table 4: 8 ranks, 24 micro-batches, one layer less on the first and last stage, no flash
    ("gpt-1.5b", 30e9, "1f1b", 8, MicroBatch(6, 1024, flash=False), ZERO_BUBBLE),
    ("gpt-1.5b", 32e9, "zb1p", 8, MicroBatch(6, 1024, flash=False), ZERO_BUBBLE),
    ("gpt-1.5b", 40e9, "interleaved_1f1b", 8, MicroBatch(6, 1024, flash=False), ZERO_BUBBLE),
    ("gpt-6.2b", 39e9, "1f1b", 8, MicroBatch(3, 1024, flash=False), ZERO_BUBBLE),
    ("gpt-6.2b", 42e9, "zb1p", 8, MicroBatch(3, 1024, flash=False), ZERO_BUBBLE),
    ("gpt-6.2b", 48e9, "interleaved_1f1b", 8, MicroBatch(3, 1024, flash=False), ZERO_BUBBLE),
    # Megatron-Bridge, skills/nemo-mbridge-perf-expert-parallel-overlap: 16 H100, expert parallelism over all
    ("qwen3-30b-a3b", 62.166 * GIB, "1f1b", 1, MicroBatch(1, 4096, ep=16), {"dp": 16}),
]  # fmt: skip


@pytest.mark.parametrize("model,peak,name,pp,batch,options", PEAKS)
def test_published_peaks(model, peak, name, pp, batch, options):
    shape = read_shape(model)
    chunks = len(shape.layers) // 8 + 1 if name == "interleaved_1f1b" else None
    schedule = build(name, pp, 24, chunks)
    ranks = peak_memory(shape, schedule, batch, stages_of(shape, schedule.num_stages), **options)
    assert max(rank.total for rank in ranks) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("name", [*published_models(), "deepseek-v3"])
def test_every_published_model_is_counted(name):
    shape = read_shape(name)
    schedule = build("1f1b", 2, 4)
    stages = stages_of(shape, 2)
    one, two = (peak_memory(shape, schedule, MicroBatch(1, 2048, tp=tp), stages, dp=2) for tp in (1, 2))
    assert sum(rank.weights for rank in one) == 2 * (shape.parameters + shape.embedding * shape.tied)
    for narrow, wide in zip(two, one, strict=True):
        assert wide.activations / 2 == pytest.approx(narrow.activations, rel=1e-3)
        assert wide.gradients == 2 * wide.weights
        dense = wide.weights - narrow.weights
        assert 0 < dense <= wide.weights / 2


@pytest.mark.parametrize("name", NAMES)
def test_a_short_schedule_has_the_peak_of_a_long_one(name):
    chunks = 2 if name == "interleaved_1f1b" else None
    for pp in (2, 4):
        long, short = build(name, pp, 12 * pp, chunks), full_schedule(name, pp, 12 * pp, chunks)
        sizes = {s: StageBytes(7 + s, 3 + s % 3, 5, 4 - s % 2) for s in range(long.num_stages)}
        for pair in zip(long.actions, short.actions, strict=True):
            assert len({peak_of_actions(actions, sizes) for actions in pair}) == 1
    fewest = 4 if name.startswith("dualpipe") else 2
    assert full_schedule(name, 2, fewest, chunks).num_micro_batches == fewest


@pytest.mark.parametrize("seed", range(20))
def test_the_peak_of_random_actions_is_that_of_every_moment(seed):
    """Brute force: what exists is a set of named pieces, and its largest sum over all moments counts."""
    choose = random.Random(seed)
    stages, pieces, peak, saved_peak = range(3), {}, 0, 0
    sizes = {s: StageBytes._make([*choose.choices([0, 1, 7, 30], k=4), choose.choice([0, 50])]) for s in stages}
    todo = {(s, m): [Forward(s, m), *([Backward(s, m)] if choose.random() < 0.5 else
            [Backward(s, m, Part.INPUT), Backward(s, m, Part.WEIGHT)])] for s in stages for m in range(3)}  # fmt: skip
    order = []
    while todo:
        key = choose.choice([*todo])
        order.append(todo[key].pop(0))
        todo = {one: rest for one, rest in todo.items() if rest}
    last = {action.stage: index for index, action in enumerate(order)}
    for index, action in enumerate(order):
        size, key = sizes[action.stage], (action.stage, action.micro_batch)
        if isinstance(action, Forward):
            pieces["saved", key] = size.saved
        elif action.part is Part.WEIGHT:
            del pieces["deferred", key]
        else:
            peak = max(peak, sum(pieces.values()) + (size.full if action.part is Part.FULL else size.split))
            del pieces["saved", key]
            if action.part is Part.INPUT:
                pieces["deferred", key] = size.deferred
        saved_peak = max(saved_peak, sum(value for (kind, *_), value in pieces.items() if kind != "sums"))
        if last[action.stage] == index:
            pieces["sums", action.stage] = size.sums
        peak = max(peak, sum(pieces.values()))
    assert peak_of_actions(order, sizes) == (saved_peak, max(0, peak - saved_peak))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp,ep,dp", [(2, 4, 4), (4, 1, 2), (1, 2, 8)])
def test_the_optimizer_state_is_divided_over_all_copies_of_a_parameter(tp, ep, dp, tied):
    """A stage is on dp x tp GPUs. An expert's tensor has dp x tp / ep copies there, and one of the others dp."""
    shape = dataclasses.replace(read_shape("olmoe-1b-7b"), tied=tied)
    [rank] = peak_memory(shape, build("1f1b", 1, 2), MicroBatch(1, 64, tp=tp, ep=ep), stages_of(shape, 1), dp)
    expected = 12 * (shape.dense_parameters / tp / dp + shape.expert_parameters / (dp * tp))
    assert rank.optimizer == pytest.approx(expected, rel=1e-6)


# ---- Details of activations ----


FEW = shape_of(ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=6, num_dense_layers=0, num_heads=6, num_kv_heads=3, head_dim=10,
    expert_size=11, num_experts=6, experts_per_token=4, num_shared_experts=0,
))  # fmt: skip
LAYER = FEW.layers[0]


def stage(layers: int) -> StageSpec:
    return StageSpec(range(layers), True, False, 1.0)


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_rows_received_equal_those_of_random_choices(ep):
    choose = random.Random(ep)
    rows = sum(len({expert // (6 // ep) for expert in choose.sample(range(6), 4)}) for _ in range(4000))
    assert rows_received(LAYER, MicroBatch(4, 1000, ep=ep)) == pytest.approx(rows, rel=0.03)


@pytest.mark.parametrize("ep,plain,rows", [(1, True, 1), (1, False, 2), (2, True, 2), (2, False, 2)])
def test_only_plain_pairs_on_one_rank_drop_the_output_of_their_stage(ep, plain, rows):
    spec, batch = stage(3), MicroBatch(2, 8, ep=ep, plain=plain)
    ends = saved_bytes(FEW, spec, batch) - sum(block_bytes(FEW, spec, layer, batch) for layer in spec.layers)
    assert ends == batch.tokens * (8 + rows * FEW.hidden * batch.element)  # the tokens' ids are 8 bytes each


def test_gradients_of_plain_experts_are_those_of_one_rank_only():
    """With a single token, the sum of weight gradients is the most: in fp32, for gate and up of each local expert."""
    sizes = [mlp_working(FEW, LAYER, MicroBatch(1, 1, ep=ep, plain=True)) for ep in (1, 2, 3)]
    assert sizes == [4 * 2 * 11 * 20 * experts for experts in (6, 3, 2)]


def test_deferred_gradients_of_every_block_add_to_the_peak():
    """If they need more than a block frees, the peak is at the first block: another block adds the difference."""
    batch, spec = MicroBatch(2, 8, recompute="full"), stage(5)
    more = deferred_mlp(FEW, LAYER, batch) + deferred_attention(FEW, LAYER, batch) - block_bytes(FEW, spec, 2, batch)
    four, five = (working_bytes(FEW, stage(layers), batch, deferring=True) for layers in (4, 5))
    assert five - four == more > 0
