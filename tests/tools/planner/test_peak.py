"""Peak memory: a shape is counted as the model that is built, published peaks are met, and changes named do fit."""

import dataclasses
import random
import re
from collections import Counter
from typing import Any

import pytest
import torch

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.models import ModelConfig, StageSpec, TransformerStage, split
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
from moe_dualpipe.runtime.layout import Layout
from moe_dualpipe.schedule import NAMES, Backward, Forward, Part, build, default_schedule
from moe_dualpipe.tools.planner import full_schedule, read_shape, shape_of, stages_of
from moe_dualpipe.tools.planner.published_shapes import published_models
from moe_dualpipe.training.config import BatchConfig, CheckpointConfig, OptimizerConfig, TrainConfig
from moe_dualpipe.training.layout_choice import Choice
from moe_dualpipe.training.memory_check import MARGIN, memory_line, memory_problem, step_memory

ONE = build("1f1b", 1, 2)
AWKWARD = ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=9, num_dense_layers=2, num_heads=6, num_kv_heads=3, head_dim=10,
    qk_norm="head", qkv_bias=True, dense_size=7, expert_size=11, num_experts=6, experts_per_token=3,
    num_shared_experts=2, shared_gate=True, router_dtype="float32",
)  # fmt: skip


@pytest.mark.parametrize("name,ranks", [("dualpipe", 4), ("1f1b", 3), ("dualpipev", 2), ("1f1b", 1)])
@pytest.mark.parametrize("config", [
    AWKWARD, dataclasses.replace(AWKWARD, tied_embeddings=True), dataclasses.replace(AWKWARD, mtp_layers=1),
])  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"ep": 2, "recompute": "full", "fused_loss": True}, {"recompute": "norms"}])
def test_ranks_hold_the_parameters_of_their_stages(config, name, ranks, options):
    """Parameters are those of tensors that are built. Details of activations differ between a model and its shape."""
    schedule, batch = build(name, ranks, 8), MicroBatch(2, 16, **options)
    stages, ep = split(config, schedule.num_stages), batch.ep
    built, computed = (peak_memory(model, schedule, batch, 4, stages=stages) for model in (config, shape_of(config)))
    (whole, *_) = peak_memory(config, schedule, batch, 4, zero=False, stages=stages)
    many = peak_memory(config, schedule, batch, 64, stages=stages)
    for number, (one, other) in enumerate(zip(built, computed, strict=True)):
        with torch.device("meta"):
            parts = [TransformerStage(config, stages[s], Loopback(config.num_experts, ep))
                     for s in schedule.placement.stages[number]]  # fmt: skip
        tensors = {key: (p, ".experts." in key) for stage in parts for key, p in stage.named_parameters()}
        held = Counter()
        for p, routed in tensors.values():  # one tied embedding
            held[routed] += p.numel()
        assert (one.weights, one.gradients) == (2 * held.total(), 4 * held.total()) == (other.weights, other.gradients)
        assert other.activations == pytest.approx(one.activations, rel=0.06)
        holders = len(schedule.placement.holders(schedule.placement.stages[number][0]))
        least = 12 * (held[False] / (4 * holders * 2) + held[True] * ep / (4 * holders))
        ends = any(stages[s].embedding or stages[s].head for s in schedule.placement.stages[number])
        assert least <= other.optimizer <= one.optimizer < 12 * held.total()
        assert not ends or many[number].optimizer >= 12 * config.vocab_size * config.hidden_size  # a tensor is whole
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


# ---- Details of activations ----


FEW = ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=6, num_dense_layers=0, num_heads=6, num_kv_heads=3, head_dim=10,
    expert_size=11, num_experts=6, experts_per_token=4, num_shared_experts=0,
)  # fmt: skip


def stage(layers: int) -> StageSpec:
    return StageSpec(range(layers), True, False, 1.0)


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_rows_received_equal_those_of_random_choices(ep):
    choose = random.Random(ep)
    rows = sum(len({expert // (6 // ep) for expert in choose.sample(range(6), 4)}) for _ in range(4000))
    assert rows_received(FEW, MicroBatch(4, 1000, ep=ep)) == pytest.approx(rows, rel=0.03)


@pytest.mark.parametrize("ep,plain,rows", [(1, True, 1), (1, False, 2), (2, True, 2), (2, False, 2)])
def test_only_plain_pairs_on_one_rank_drop_the_output_of_their_stage(ep, plain, rows):
    spec, batch = stage(3), MicroBatch(2, 8, ep=ep, plain=plain)
    ends = saved_bytes(FEW, spec, batch) - sum(block_bytes(FEW, spec, layer, batch) for layer in spec.layers)
    assert ends == batch.tokens * (8 + rows * FEW.hidden_size * batch.element)  # the tokens' ids are 8 bytes each


def test_gradients_of_plain_experts_are_those_of_one_rank_only():
    """With a single token, the sum of weight gradients is the most: in fp32, for gate and up of each local expert."""
    sizes = [mlp_working(FEW, 0, MicroBatch(1, 1, ep=ep, plain=True)) for ep in (1, 2, 3)]
    assert sizes == [4 * 2 * 11 * 20 * experts for experts in (6, 3, 2)]


def test_deferred_gradients_of_every_block_add_to_the_peak():
    """If they need more than a block frees, the peak is at the first block: another block adds the difference."""
    batch, spec = MicroBatch(2, 8, recompute="full"), stage(5)
    more = deferred_mlp(FEW, 2, batch) + deferred_attention(FEW, batch) - block_bytes(FEW, spec, 2, batch)
    four, five = (working_bytes(FEW, stage(layers), batch, deferring=True) for layers in (4, 5))
    assert five - four == more > 0


# ---- Before a run starts: what is known, what is refused, and changes that then really fit ----


MODEL = ModelConfig(num_layers=8, num_experts=8, experts_per_token=3, dense_size=192)
CPU, GPU = torch.device("cpu"), torch.device("cuda")
FLAGS = {"micro-batch-size": int, "recompute": str}


def config_of(batch=BatchConfig(seq_len=96, batch_size=48), compute=(), **changes) -> Any:  # noqa: B008
    config: Any = TrainConfig(model=MODEL, checkpoint=CheckpointConfig(save_async=False))
    return dataclasses.replace(
        config, batch=batch, compute=dataclasses.replace(config.compute, **dict(compute)), **changes
    )


def run_of(config, layout=Layout(), size=3, dtype=torch.float32, device=CPU) -> Any:  # noqa: B008
    name = default_schedule(layout.pp)
    schedule = build(name, layout.pp, config.batch.batch_size // (layout.dp * size))
    return config, Choice(layout, name, schedule, size), dtype, device


def fullest(*run):
    return max(step_memory(*run), key=lambda rank: rank.total)


def low(*run):
    needs = fullest(*run)
    return needs.total - MARGIN * (needs.activations + needs.temporary)


def test_what_fits_is_no_problem_and_one_byte_less_is():
    run = run_of(config_of(), Layout(2, 2, 2))
    assert memory_problem(*run, free_bytes=round(low(*run)) + 2) == ""
    assert memory_problem(*run, free_bytes=round(low(*run)) - 2).startswith("pipeline rank ")


@pytest.mark.parametrize("share", [0.95, 0.7, 0.5, 0.35])
@pytest.mark.parametrize("layout", [Layout(), Layout(2, 2, 2), Layout(1, 4, 4)], ids=str)
@pytest.mark.parametrize("device", [CPU, GPU], ids=str)
def test_the_change_that_a_problem_names_fits(layout, share, device):
    config = config_of()
    run = run_of(config, layout, dtype=torch.bfloat16, device=device)
    free = round(share * low(*run))
    text = memory_problem(*run, free_bytes=free)
    assert text.endswith(", or --set health.check_memory=false to start anyway") and "\n" not in text
    use, needs, unit = re.fullmatch(
        r".* are free: use (.*?)(?:, which needs ([\d.]+) (.iB))?, or --set .*", text
    ).groups()
    if needs is None:  # with everything saved, it does not fit either
        most = run_of(config_of(compute={"recompute": "full", "fused_loss": True}), layout, 1, torch.bfloat16, device)
        assert use == "more processes, a smaller model or shorter sequences" and low(*most) > free
        return
    found = {name: kind(value) for name, kind in FLAGS.items() for value in re.findall(rf"--{name} (\w+)", use)}
    compute = {"recompute": found.get("recompute", "none"), "fused_loss": "--fused-loss" in use}
    changed = run_of(config_of(compute=compute), layout, found.get("micro-batch-size", 3), torch.bfloat16, device)
    assert low(*changed) <= free < low(*run)
    assert low(*changed) / 2 ** {"MiB": 20, "GiB": 30}[unit] == pytest.approx(float(needs), abs=0.06)


def test_saving_in_the_background_copies_weights_and_moments():
    tiny = config_of(BatchConfig(seq_len=3, batch_size=16), {"recompute": "full", "fused_loss": True})
    saving = dataclasses.replace(tiny, checkpoint=CheckpointConfig(save_async=True))
    run = run_of(saving, size=1)
    needs = fullest(*run)
    copied = needs.weights + needs.optimizer + 3 * needs.gradients  # fp32 weights and two moments
    assert copied > needs.total
    text = memory_problem(*run, free_bytes=copied - 1)
    assert "copy for checkpoints" in text and ": use --set checkpoint.save_async=false, which needs " in text
    assert memory_problem(*run, free_bytes=copied) == ""
    assert memory_problem(*run_of(tiny, size=1), free_bytes=copied - 1) == ""
    on_gpu = run_of(saving, size=1, device=GPU)
    assert memory_problem(*on_gpu, free_bytes=fullest(*on_gpu).total) == ""


@pytest.mark.parametrize("name,each", [("adamw", 12), ("muon", 8)])
def test_the_optimizer_has_one_moment_or_two_and_fp32_weights(name, each):
    run = run_of(config_of(optim=OptimizerConfig(name)), dtype=torch.bfloat16)
    needs = fullest(*run)
    assert needs.optimizer == each * needs.gradients // 4
    assert f"{needs.total / 2**20:,.1f} MB on the fullest rank (weights " in memory_line(*run)


@pytest.mark.parametrize(
    "changes", [{"freeze": ("embedding.*",)}, {"attention": "none.py:A"}, {"experts": "none.py:E"}]
)
def test_memory_with_frozen_parameters_and_layers_of_ones_own_is_unknown(changes):
    config = config_of(**changes) if "freeze" in changes else config_of()
    if "freeze" not in changes:
        config = dataclasses.replace(config, model=dataclasses.replace(MODEL, **changes))
    run = run_of(config)
    assert memory_line(*run) == "" and memory_problem(*run, free_bytes=1) == ""
