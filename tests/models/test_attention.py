"""Attention with a cache, with a document mask, and in bf16; and the choice of its kernels on GPUs.

That its numbers are those of transformers is in tests/checkpoint/test_published_models.py.
"""

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

from moe_dualpipe.models import KVCache, StageOptions, StageSpec, TransformerStage, build_model, filled_cache, split
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.models.latent_attention import LatentAttention
from moe_dualpipe.models.sdpa import preferred_kernels
from tests.support.models import CONFIG, with_choices

LATENT = {"attention": "mla", "kv_rank": 8, "rope_dim": 4, "value_dim": 7}


def piecewise(module, x, sizes, cache):
    with torch.no_grad():
        return torch.cat([module(piece, cache=cache) for piece in x.split(sizes, dim=1)], dim=1)


@pytest.mark.parametrize("room", [3, 256])  # the cache grows during the test only with 3
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("choices", [
    {"num_kv_heads": 4}, {"num_kv_heads": 2}, {"num_heads": 6, "num_kv_heads": 1}, {"qk_norm": "head"},
    {"qk_norm": "full"}, LATENT, LATENT | {"q_rank": 9},
], ids=str)  # fmt: skip
@pytest.mark.quick(
    "{'num_kv_heads': 4}-1-3", "{'num_kv_heads': 2}-3-256", "{'num_heads': 6, 'num_kv_heads': 1}-3-3",
    "{'qk_norm': 'head'}-3-3", "{'qk_norm': 'full'}-1-256",
    "{'attention': 'mla', 'kv_rank': 8, 'rope_dim': 4, 'value_dim': 7}-3-3",
    "{'attention': 'mla', 'kv_rank': 8, 'rope_dim': 4, 'value_dim': 7, 'q_rank': 9}-1-256",
)  # fmt: skip
def test_a_cached_forward_equals_the_plain_forward(monkeypatch, choices, sequences, room):
    """A prompt, then single positions, then several at once. Latent attention absorbs what it expands otherwise."""
    monkeypatch.setattr(KVCache, "STEP", room)
    model = build_model(with_choices(**choices)).double()
    for norm in model.modules():
        if isinstance(norm, nn.RMSNorm):
            norm.weight.detach().uniform_(0.5, 2)  # so that a missing or exchanged norm changes the result
    x, cache = torch.randint(31, (sequences, 14)), KVCache()
    pieces = piecewise(model, x, [5, 1, 1, 4, 3], cache)
    assert cache.length == 14
    with torch.no_grad():
        torch.testing.assert_close(pieces, model(x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("length", [0, 5, 300])
@pytest.mark.parametrize("choices", [{}, LATENT], ids=["gqa", "mla"])
def test_a_filled_cache_works_as_a_past(choices, length):
    """Positions one by one behind a filled cache give what they give together, and not what they give alone."""
    stage = TransformerStage(with_choices(**choices), StageSpec(range(1, 3), False, False, 0.5)).double()
    x = torch.randn(3, 4, CONFIG.hidden_size, dtype=torch.float64)
    cache = filled_cache(stage.config, stage.spec.layers, 3, length, "cpu", torch.float64)
    assert cache.length == length
    after_past = piecewise(stage, x, [1, 1, 2], cache)
    assert cache.length == length + 4
    cache.length = length
    torch.testing.assert_close(piecewise(stage, x, [4], cache), after_past, atol=1e-12, rtol=1e-12)
    assert torch.allclose(after_past, piecewise(stage, x, [4], KVCache())) == (length == 0)


@pytest.mark.parametrize("kind", [Attention, LatentAttention])
def test_angles_are_fp32_in_a_bf16_model(kind):
    """In bf16, angles at position 999 would be wrong by whole turns. The reference is the same layer in fp32."""
    layer = kind(CONFIG).bfloat16()
    x = torch.randn(1, 1000, CONFIG.hidden_size).bfloat16()
    exact = kind(CONFIG)
    exact.load_state_dict(layer.state_dict())
    error = (layer(x).float() - exact(x.float())).norm() / exact(x.float()).norm()
    assert error < 0.02


def test_cudnn_comes_first_where_it_is_fastest():
    order = preferred_kernels((9, 0))
    assert order is not None and order[0] == SDPBackend.CUDNN_ATTENTION
    assert len(set(order)) == 4  # what cuDNN does not support runs, too
    assert not any(map(preferred_kernels, [(8, 0), (8, 9), (12, 0)]))


# ---- Documents ----

LENGTHS = 5, 1, 7, 2, 4
ORDERS = [LENGTHS, (2, 7, 1, 5, 4)]
"""The lengths of the documents in each row of a window."""


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("choices", [{}, LATENT], ids=["gqa", "mla"])
def test_a_document_in_a_window_gives_the_same_result_as_alone(choices, stages):
    config = with_choices(**choices)
    plain = build_model(config, options=StageOptions(seed=3)).double()
    pipeline = [TransformerStage(config, spec, options=StageOptions(seed=3)).double() for spec in split(config, stages)]
    tokens = torch.randint(CONFIG.vocab_size, (2, sum(LENGTHS)))
    output = tokens, torch.stack([torch.arange(len(order)).repeat_interleave(torch.tensor(order)) for order in ORDERS])
    with torch.no_grad():
        for stage in pipeline:
            output = stage(*output)
        alone = torch.stack([
            torch.cat([plain(document[None])[0] for document in row.split(order)])
            for row, order in zip(tokens, ORDERS, strict=True)
        ])  # fmt: skip
        torch.testing.assert_close(output, alone, atol=1e-12, rtol=1e-12)
        assert (plain(tokens) - output).abs().max() > 0.1
