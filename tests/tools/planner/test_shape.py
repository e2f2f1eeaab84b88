"""Shapes of models: counts against built models and torch's counter, and against published numbers."""

import dataclasses
import statistics
from collections import defaultdict

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.planner.__main__ import OWN
from benchmarks.planner.rows import read_rows
from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.expert_parallel.parameters import expert_ids
from moe_dualpipe.models import PRESETS, ModelConfig, TransformerStage, build_model, next_token_loss, split
from moe_dualpipe.models.costs import train_flops_per_token
from moe_dualpipe.tools.planner import Attention, read_shape, shape_of
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
    *(dataclasses.replace(config, num_layers=config.num_dense_layers + 1) for config in PRESETS.values()),
    AWKWARD, LATENT, dataclasses.replace(LATENT, q_rank=0, mtp_layers=0, num_dense_layers=5),
], ids=[*PRESETS, "awkward", "latent", "dense"])  # fmt: skip
def test_a_shape_counts_the_parameters_of_the_model_that_is_built(config):
    with torch.device("meta"):
        stage = TransformerStage(config, split(config, 1)[0], Loopback(config.num_experts, 1))
    sizes, ids = {name: p.numel() for name, p in stage.named_parameters()}, expert_ids(stage)
    experts = sum(size for name, size in sizes.items() if name in ids)
    dense, shape = sum(sizes.values()) - experts, shape_of(config)
    assert (shape.dense_parameters, shape.expert_parameters) == (dense, experts)
    assert shape.active_parameters == dense + experts * config.experts_per_token // config.num_experts
    assert shape.embedding == sizes["embedding.weight"]


BATCH, LENGTH = 2, 7
SIZES = {
    "vocab_size": 11, "hidden_size": 12, "num_layers": 3, "num_heads": 4, "dense_size": 20, "expert_size": 5,
    "num_experts": 6, "experts_per_token": 2, "num_shared_experts": 2, "head_dim": 6,
}  # fmt: skip


@pytest.mark.parametrize("choices,widths", [
    ({"num_kv_heads": 2}, 12),
    ({"attention": "mla", "kv_rank": 7, "rope_dim": 2, "value_dim": 5, "q_rank": 3}, 13),
    ({"num_kv_heads": 2, "shared_gate": True, "qkv_bias": True, "rotary_fraction": 0.67, "tied_embeddings": True,
      "num_dense_layers": 0, "dense_layers": (1,), "yarn_factor": 2.0}, 12),
], ids=["gqa", "mla", "options"])  # fmt: skip
def test_flops_equal_those_of_torch_without_masked_scores(choices, widths):
    """The math backend computes all S scores of a position; (S + 1) / 2 of them count."""
    config = ModelConfig(**SIZES, **choices)
    model, tokens = build_model(config).double(), torch.randint(11, (BATCH, LENGTH))
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            loss = next_token_loss(model(tokens), tokens)
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    masked = config.num_layers * config.num_heads * widths * (LENGTH - 1)
    expected = BATCH * LENGTH * (shape_of(config).forward_flops(LENGTH) + masked)
    assert (forward.get_total_flops(), backward.get_total_flops()) == (expected, 2 * expected)
    assert train_flops_per_token(config, LENGTH) == 3 * shape_of(config).forward_flops(LENGTH)


def test_mtp_flops_equal_those_of_torch():
    config = ModelConfig(**SIZES, num_kv_heads=2, mtp_layers=2)
    model, tokens = build_model(config).double(), torch.randint(11, (BATCH, LENGTH))
    output = model(tokens).detach().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as loss:
        model.loss(output, tokens)
    masked = sum(config.num_heads * 12 * n * (n - 1) for n in (LENGTH - 1, LENGTH - 2))
    head = LENGTH * 2 * config.hidden_size * config.vocab_size
    assert loss.get_total_flops() == BATCH * (head + shape_of(config).mtp_flops(LENGTH) + masked)
    train = 3 * (LENGTH * shape_of(config).forward_flops(LENGTH) + shape_of(config).mtp_flops(LENGTH))
    assert 0 <= train - LENGTH * train_flops_per_token(config, LENGTH) < 3 * LENGTH


@pytest.mark.parametrize("seq_len", [1, 2, 5, 300])
@pytest.mark.parametrize("window", [0, 1, 2, 7, 300, 301])
def test_pairs_of_a_window_equal_those_of_a_mask(window, seq_len):
    attention = Attention("gqa", 4, 2, 6, 10, window=window)
    seen = [[k <= q and (not window or q - k < window) for k in range(seq_len)] for q in range(seq_len)]
    assert attention.pairs(seq_len) == sum(map(sum, seen))
    assert attention.score_flops(seq_len) == 4 * 2 * (6 + 10) * sum(map(sum, seen)) // seq_len


BILLIONS = {
    # Numbers of parameters: all, and those of a token. The source of each is where they were published.
    "llama2-7b": (6.738, 6.738), "llama2-13b": (13.016, 13.016), "llama2-70b": (68.977, 68.977),
    "llama3-8b": (8.030, 8.030), "llama3-70b": (70.554, 70.554), "llama3.1-405b": (405.853, 405.853),
    "mixtral-8x7b": (46.703, 12.88), "mixtral-8x22b": (140.62, 39.15),
    "moonlight-16b-a3b": (15.96, None), "qwen3-30b-a3b": (30.53, 3.34), "qwen3-235b-a22b": (235.1, 22.1),
    "deepseek-v2": (235.74, 21.4), "deepseek-v2-lite": (15.706, 2.66), "deepseek-v3": (671.03, 37.5),
    "kimi-k2": (1026.4, 32.9), "glm-4.5": (355, None), "glm-4.5-air": (106, None), "dbrx": (131.6, 36.5),
    "olmoe-1b-7b": (6.919, 1.28), "nemotron-4-340b": (341.0, 341.0), "megascale-352b": (352, None),
    "gpt3-175b": (174.6, 174.6), "gpt-oss-20b": (20.91, 3.61 + 0.579), "gpt-oss-120b": (116.83, 5.13 + 0.579),
}  # fmt: skip
"""Billions of parameters, all and those that a token uses, from model cards, papers and the indices of weights. The
paper of gpt-oss leaves out the embedding of 0.579."""


@pytest.mark.parametrize("name", BILLIONS)
def test_parameters_of_published_models(name):
    shape, (total, active) = read_shape(name), BILLIONS[name]
    assert shape.parameters == pytest.approx(total * 1e9, rel=0.01)
    assert active is None or shape.active_parameters == pytest.approx(active * 1e9, rel=0.01)


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
    assert shape.parameters / 1e9 == pytest.approx(float(name[4:].removesuffix("b")), abs=0.06)


def test_flops_per_token_are_those_of_published_runs():
    """FLOP/s divided by tokens/s. A row of llama3-70b contradicts the others, so the median of a model counts."""
    ratios = defaultdict(list)
    for row in read_rows(sorted(OWN.glob("*.json"))):
        tflops = row.record["also"].get("model_tflops_per_gpu")
        if tflops and row.record["group"] in ("bridge", "bridge-cards", "bridge-cards-validation"):
            tokens = row.load.tokens / row.seconds / row.load.layout.num_ranks
            flops = row.load.shape.train_flops(row.load.seq)
            ratios[row.record["group"], row.load.shape.name].append(tflops * 1e12 / tokens / flops)
    assert len(ratios) >= 6
    for name, found in ratios.items():
        assert statistics.median(found) == pytest.approx(1, rel=0.06), name
    # arXiv 2505.11432, table 3: 272.9 k tokens/s on 240 H800, whose peak is 989 TFLOP/s, are 32.48% MFU.
    assert 272_900 / 240 * read_shape("megascale-352b").train_flops(8192) / 989.4e12 == pytest.approx(0.3248, rel=0.01)
