"""Peak memory of any layout: a shape is counted as the model that is built, and published peaks are met."""

import dataclasses
import random

import pytest
from moe_dualpipe.tools.planner.backward_memory import working_bytes

from moe_dualpipe.models import ModelConfig, preset, split
from moe_dualpipe.runtime.groups import end_holders
from moe_dualpipe.schedule import NAMES, Backward, Forward, Part, build
from moe_dualpipe.tools.planner import MicroBatch, full_schedule, peak_memory, read_shape, shape_of
from moe_dualpipe.tools.planner.activations import deferred_bytes, saved_bytes
from moe_dualpipe.tools.planner.peak import StageBytes, config_of, peak_of_actions, stages_of
from moe_dualpipe.tools.planner.published_shapes import published_models

ONE = build("1f1b", 1, 2)
AWKWARD = ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=9, num_dense_layers=2, num_heads=6, num_kv_heads=3, head_dim=10,
    qk_norm="head", qkv_bias=True, dense_size=7, expert_size=11, num_experts=6, experts_per_token=3,
    num_shared_experts=2, shared_gate=True, router_dtype="float32",
)  # fmt: skip


@pytest.mark.parametrize("name,ranks", [("dualpipe", 4), ("1f1b", 3), ("dualpipev", 2), ("zb1p", 4), ("1f1b", 1)])
@pytest.mark.parametrize("config", [
    AWKWARD, dataclasses.replace(AWKWARD, tied_embeddings=True), dataclasses.replace(AWKWARD, mtp_layers=1),
    preset("small"),
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"ep": 2, "recompute": "full", "fused_loss": True}, {"recompute": "norms"}])
def test_a_shape_is_counted_as_the_model_that_is_built(config, name, ranks, options):
    """Its parameters are computed, and those of a model are those of tensors. Only details of activations differ."""
    schedule, batch = build(name, ranks, 8), MicroBatch(2, 16, **options)
    stages = split(config, schedule.num_stages)
    for zero in (True, False):
        built, computed = (
            peak_memory(model, schedule, batch, 4, zero=zero, stages=stages) for model in (config, shape_of(config))
        )
        for number, (one, other) in enumerate(zip(built, computed, strict=True)):
            parts = "weights", "gradients", "dense_parameters", "expert_parameters"
            assert all(getattr(one, part) == getattr(other, part) for part in parts)
            assert other.activations == pytest.approx(one.activations, rel=0.06)
            if not zero:
                assert one.optimizer == other.optimizer
                continue
            replicas = schedule.placement.holders(schedule.placement.stages[number][0])
            if config.last_stage_embeds and number in (ends := end_holders(schedule.placement)):
                replicas = ends
            # Runs divide whole tensors: the largest share is at least the even one.
            assert other.optimizer <= max(built[r].optimizer for r in replicas)


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
    ranks = peak_memory(shape, schedule, batch, stages=stages_of(shape, schedule.num_stages), **options)
    assert max(rank.total for rank in ranks) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize("name", [*published_models(), "deepseek-v3"])
def test_every_published_model_is_counted(name):
    shape = read_shape(name)
    schedule = build("1f1b", 2, 4)
    one, two = (peak_memory(shape, schedule, MicroBatch(1, 2048, tp=tp), dp=2) for tp in (1, 2))
    assert sum(rank.weights for rank in one) == 2 * (shape.parameters + shape.embedding * shape.tied)
    for narrow, wide in zip(two, one, strict=True):
        assert wide.activations / 2 == pytest.approx(narrow.activations, rel=1e-3)
        assert wide.gradients == 2 * wide.weights
        dense = wide.weights - narrow.weights
        assert 0 < dense <= wide.weights / 2


def test_divisions_divide():
    shape, schedule = shape_of(AWKWARD), build("1f1b", 3, 6)
    plain = peak_memory(shape, schedule, MicroBatch(4, 64), dp=8)
    context = peak_memory(shape, schedule, MicroBatch(4, 64, cp=2), dp=8)
    both = peak_memory(shape, schedule, MicroBatch(4, 64, cp=2, tp=2), dp=8)
    for one, other, third in zip(plain, context, both, strict=True):
        assert (one.weights, one.gradients) == (other.weights, other.gradients)
        assert one.optimizer == pytest.approx(2 * other.optimizer, rel=0.01)
        assert one.activations == pytest.approx(2 * other.activations, rel=0.01)
        assert one.activations == pytest.approx(4 * third.activations, rel=0.01)
        assert third.temporary < one.temporary / 3
    experts = peak_memory(shape, schedule, MicroBatch(4, 64, ep=6), dp=6)
    spec = split(AWKWARD, 3)[1]
    held = sum(shape.layers[layer].expert_parameters(20) for layer in spec.layers)
    assert plain[1].weights - experts[1].weights == 2 * (held - held // 6)


def test_deferred_weight_gradients_need_8_bits_with_fp8_but_for_the_head():
    """zb1p defers them; indices of the experts stay as they are."""
    first, last = split(AWKWARD, 2)
    bf16, fp8 = MicroBatch(4, 64, ep=2), MicroBatch(4, 64, ep=2, fp8=True)
    without = dataclasses.replace(last, head=False)
    head = deferred_bytes(AWKWARD, last, bf16) - deferred_bytes(AWKWARD, without, bf16)
    assert head == deferred_bytes(AWKWARD, last, fp8) - deferred_bytes(AWKWARD, without, fp8) > 0
    saved = deferred_bytes(AWKWARD, first, bf16) - deferred_bytes(AWKWARD, first, fp8)
    assert 0.4 < saved / deferred_bytes(AWKWARD, first, bf16) < 0.5


def test_precision_and_zero():
    shape, batch = shape_of(AWKWARD), MicroBatch(4, 64)
    (bf16,), (fp8,), (fp32,) = (peak_memory(shape, ONE, batch, 4, precision) for precision in ("bf16", "fp8", "fp32"))
    (full,) = peak_memory(shape, ONE, batch, 4, zero=False)
    n = shape.parameters
    assert (bf16.weights, fp8.weights, fp32.weights) == (2 * n, 3 * n, 4 * n)
    assert (full.optimizer, bf16.optimizer, fp32.optimizer) == (12 * n, 12 * -(-n // 4), 8 * -(-n // 4))
    assert bf16.activations / 2 < fp8.activations < bf16.activations < fp32.activations
    assert fp8.gradients == fp32.gradients == full.gradients == 4 * n
    assert sum(bf16.parts().values()) == bf16.total
    assert [*bf16.parts()] == ["weights", "gradients", "optimizer", "activations", "temporary"]


def test_multi_token_prediction_is_a_further_layer():
    shape = shape_of(AWKWARD)
    more = dataclasses.replace(shape, mtp=1)
    (one,), (two,) = (peak_memory(each, ONE, MicroBatch(1, 16), stages=stages_of(each, 1)) for each in (shape, more))
    assert two.weights == 2 * more.parameters
    (same,) = peak_memory(dataclasses.replace(AWKWARD, mtp_layers=1), ONE, MicroBatch(1, 16))
    assert two == same
    assert two.activations > one.activations
    ends = peak_memory(more, build("1f1b", 3, 6), MicroBatch(1, 16))
    assert sum(rank.weights for rank in ends) == 2 * (more.parameters + more.embedding)  # on the first and last stage


def test_messages_to_and_from_neighbors_count():
    """The first and the last stage hold three at a time, and one between them four."""
    shape, batch = shape_of(AWKWARD), MicroBatch(4, 64)
    schedule, stages = build("1f1b", 3, 6), stages_of(shape, 3)
    config, message = config_of(shape), 4 * 64 * 20 * 2
    ranks = peak_memory(shape, schedule, batch, stages=stages)
    for rank, (one, messages) in enumerate(zip(ranks, (3, 4, 3), strict=True)):
        spec = stages[rank]
        sizes = StageBytes(saved_bytes(config, spec, batch), 0, working_bytes(config, spec, batch), 0)
        activations, temporary = peak_of_actions(schedule.actions[rank], {rank: sizes})
        assert (one.activations, one.temporary) == (activations, temporary + messages * message)


def test_a_block_without_a_gate_saves_half_of_its_inner_activations():
    config = config_of(read_shape("gpt3-175b"))
    assert (config.dense_size, config.num_heads, config.head_dim) == (2 * 12288, 96, 128)
    assert config_of(read_shape("gpt-oss-20b")).expert_size == 2880


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
    [rank] = peak_memory(shape, ONE, MicroBatch(1, 64, tp=tp, ep=ep), dp=dp)
    expected = 12 * (shape.dense_parameters / tp / dp + shape.expert_parameters / (dp * tp))
    assert rank.optimizer == pytest.approx(expected, rel=1e-6)
    assert rank.dense_parameters == pytest.approx(shape.dense_parameters / tp, rel=1e-6)


def test_inputs_of_products_take_one_byte_in_fp8():
    """By hand: two normalized copies, what attention puts out, and the inner activations; of dense layers."""
    model, tokens = dataclasses.replace(AWKWARD, num_dense_layers=9), 64
    [spec] = split(model, 1)
    wide, narrow = (saved_bytes(model, spec, MicroBatch(1, tokens, fp8=fp8)) for fp8 in (False, True))
    assert wide - narrow == 9 * tokens * (2 * 20 + 6 * 10 + 7)


@pytest.mark.parametrize("recompute,more", [("norms", 0), ("attention", 1), ("full", 1)])
def test_a_recomputed_router_has_an_input_of_its_own(recompute, more):
    """AWKWARD has 7 layers with experts."""
    [spec] = split(AWKWARD, 1)
    plain, again = (deferred_bytes(AWKWARD, spec, MicroBatch(1, 64, recompute=kind)) for kind in ("none", recompute))
    assert again - plain == more * 7 * 64 * 20 * 2
