"""Shapes of models: counts against built models, and parameters and FLOPs against published ones."""

import dataclasses
import statistics
from collections import defaultdict

import pytest
from moe_dualpipe.tools.planner.parameters import parameter_sizes

from benchmarks.planner.__main__ import OWN
from benchmarks.planner.rows import read_rows
from moe_dualpipe.models import PRESETS, ModelConfig, split
from moe_dualpipe.tools.planner import Attention, Layer, read_shape, shape_of
from moe_dualpipe.tools.planner.published_shapes import published_models

AWKWARD = ModelConfig(
    vocab_size=37, hidden_size=20, num_layers=5, num_dense_layers=1, dense_layers=(3,), num_heads=6, num_kv_heads=3,
    head_dim=10, qk_norm="full", qkv_bias=True, out_bias=True, dense_size=7, expert_size=11, num_experts=5,
    experts_per_token=3, num_shared_experts=2, shared_gate=True, tied_embeddings=True, mtp_layers=2, router_bias=True,
)  # fmt: skip
LATENT = dataclasses.replace(
    AWKWARD, attention="mla", qk_norm="none", q_rank=9, kv_rank=5, rope_dim=4, value_dim=3,
    num_shared_experts=0, shared_gate=False, tied_embeddings=False,
)  # fmt: skip


@pytest.mark.parametrize("config", [
    *PRESETS.values(), AWKWARD, LATENT, dataclasses.replace(LATENT, q_rank=0, mtp_layers=0, num_dense_layers=5),
    dataclasses.replace(AWKWARD, experts="examples/layers/squared_relu.py:SquaredReLUExperts", qk_norm="head"),
], ids=[*PRESETS, "awkward", "latent", "dense", "own experts"])  # fmt: skip
def test_a_shape_counts_what_the_model_counts(config):
    """Parameters are those of tensors that were built; test_flops.py compares FLOPs with torch's."""
    shape, sizes = shape_of(config), parameter_sizes(config, split(config, 1)[0])
    if not config.own_layers:
        dense, experts = sum(sizes.dense.values()), sum(sizes.experts.values())
        assert (shape.dense_parameters, shape.expert_parameters) == (dense, experts)
        assert shape.active_parameters == dense + experts * config.experts_per_token // config.num_experts
    assert shape.embedding == sizes.dense["embedding.weight"]


def test_own_attention_has_no_shape():
    with pytest.raises(ValueError, match="only for built-in layers: got your own attention"):
        shape_of(ModelConfig(attention="examples/layers/window.py:WindowAttention"))


@pytest.mark.parametrize("seq_len", [1, 2, 5, 300])
@pytest.mark.parametrize("window", [0, 1, 2, 7, 300, 301])
def test_pairs_of_a_window_equal_those_of_a_mask(window, seq_len):
    attention = Attention("gqa", 4, 2, 6, 10, window=window)
    seen = [[k <= q and (not window or q - k < window) for k in range(seq_len)] for q in range(seq_len)]
    assert attention.pairs(seq_len) == sum(map(sum, seen))
    assert attention.score_flops(seq_len) == 4 * 2 * (6 + 10) * sum(map(sum, seen)) // seq_len


def test_products_of_a_layer():
    layer = Layer(Attention("gqa", 4, 2, 6, 6), gated=False, experts=8, top_k=3, expert_size=5, shared_size=7)
    assert [tuple(p) for p in layer.products(16)] == [
        ("qkv", 16, 48, 1), ("attention_out", 24, 16, 1), ("router", 16, 8, 1), ("shared_in", 16, 7, 1),
        ("shared_out", 7, 16, 1), ("expert_in", 16, 5, 3), ("expert_out", 5, 16, 3),
    ]  # fmt: skip
    assert layer.flops(16) == 2 * (16 * 48 + 24 * 16 + 16 * 8 + 2 * 16 * 7 + 3 * 2 * 16 * 5)
    assert (layer.dense_parameters(16), layer.expert_parameters(16)) == (16 * 48 + 24 * 16 + 16 * 8 + 224, 8 * 160)
    latent = Layer(Attention("mla", 4, 4, 6, 5, 9, 8, 2), 20)
    assert [tuple(p) for p in latent.products(16)] == [
        ("latents", 16, 19, 1), ("q_up", 9, 24, 1), ("kv_up", 8, 36, 1), ("attention_out", 20, 16, 1),
        ("mlp_in", 16, 40, 1), ("mlp_out", 20, 16, 1),
    ]  # fmt: skip
    assert [p.outputs for p in Attention("mla", 4, 4, 6, 5, 0, 8, 2).products(16)] == [34, 36, 16]


BILLIONS = {
    # Numbers of parameters: all, and those of a token. The source of each is where they were published.
    "llama2-7b": (6.738, 6.738), "llama2-13b": (13.016, 13.016), "llama2-70b": (68.977, 68.977),
    "llama3-8b": (8.030, 8.030), "llama3-70b": (70.554, 70.554), "llama3.1-405b": (405.853, 405.853),
    "mixtral-8x7b": (46.703, 12.88), "mixtral-8x22b": (140.62, 39.15),
    "moonlight-16b-a3b": (15.96, None), "qwen3-30b-a3b": (30.53, 3.34), "qwen3-235b-a22b": (235.1, 22.1),
    "deepseek-v2": (235.74, 21.4), "deepseek-v2-lite": (15.706, 2.66), "deepseek-v3": (671.03, 37.5),
    "kimi-k2": (1026.4, 32.9), "glm-4.5": (355, None), "glm-4.5-air": (106, None), "dbrx": (131.6, 36.5),
    "olmoe-1b-7b": (6.919, 1.28), "nemotron-4-340b": (341.0, 341.0), "megascale-352b": (352, None),
    "gpt3-175b": (174.6, 174.6),
}  # fmt: skip
"""Billions of parameters, all and those that a token uses, from model cards, papers and the indices of weights."""


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_of_published_models(name):
    shape, (total, active) = read_shape(name), BILLIONS[name]
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    assert active is None or shape.active_parameters == pytest.approx(active * 1e9, rel=0.01)


@pytest.mark.parametrize("name,total,active", [("gpt-oss-20b", 20.91, 3.61), ("gpt-oss-120b", 116.83, 5.13)])
def test_parameters_of_a_token_without_the_embedding(name, total, active):
    """arXiv 2508.10925, table 1, counts the head but not the embedding."""
    shape = read_shape(name)
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    assert shape.active_parameters - shape.embedding == pytest.approx(active * 1e9, rel=0.01)


@pytest.mark.parametrize("name", [name for name in published_models() if name.startswith("gpt-") and name[4] != "o"])
def test_gpts_equal_the_formulas_of_their_paper(name):
    """arXiv 2104.04473, sections 5.1: P = 12 l h^2 (1 + 13/12h + (V+s)/12lh), F = 96 s l h^2 (1 + s/6h + V/16lh).

    F counts the recomputed forward, not of the head, and attention that is not causal.
    """
    shape = read_shape(name)
    h, n, v, s = shape.hidden, len(shape.layers), shape.vocab, shape.learned_positions
    assert shape.parameters == 12 * n * h**2 + 2 * n * h + (v + s) * h + h  # two norms of a block, and the last one
    full = shape.forward_flops(s) - shape.head.flops + shape.score_flops(s) * (s - 1) // (s + 1)
    assert 4 * full + 3 * shape.head.flops == 96 * n * h**2 + 16 * n * h * s + 6 * h * v
    stated = float(name[4:].removesuffix("b"))
    assert shape.parameters / 1e9 == pytest.approx(stated, abs=0.06)


@pytest.mark.parametrize("group", ["bridge", "bridge-cards", "bridge-cards-validation"])
def test_flops_per_token_are_those_of_published_runs(group):
    """FLOP/s divided by tokens/s. A row of llama3-70b contradicts the others, so the median of a model counts."""
    ratios = defaultdict(list)
    for row in read_rows(sorted(OWN.glob("*.json"))):
        if row.record["group"] == group and (tflops := row.record["also"].get("model_tflops_per_gpu")):
            tokens = row.load.tokens / row.seconds / row.load.layout.num_ranks
            flops = row.load.shape.train_flops(row.load.seq)
            ratios[row.load.shape.name].append(tflops * 1e12 / tokens / flops)
    assert len(ratios) >= 2
    for name, found in ratios.items():
        assert statistics.median(found) == pytest.approx(1, rel=0.06), name


def test_the_mfu_of_a_published_run():
    """arXiv 2505.11432, table 3: 272.9 k tokens/s on 240 H800, whose peak is 989 TFLOP/s, are 32.48% MFU."""
    flops = read_shape("megascale-352b").train_flops(8192)
    assert 272_900 / 240 * flops / 989.4e12 == pytest.approx(0.3248, rel=0.01)
