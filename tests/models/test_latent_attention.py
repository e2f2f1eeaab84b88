"""Multi-head latent attention against a loop, with a cache, and in a model."""

import dataclasses
import math

import pytest
import torch

from moe_dualpipe.models import KVCache, ModelConfig, build_model
from moe_dualpipe.models.latent_attention import LatentAttention
from tests.support.caches import check_that_a_cached_forward_is_the_forward
from tests.support.oracles import uneven_norms

CONFIG = ModelConfig(
    vocab_size=31, hidden_size=16, num_layers=3, num_dense_layers=1, attention="mla", num_heads=3, head_dim=5,
    q_rank=9, kv_rank=6, rope_dim=4, value_dim=7, dense_size=24, expert_size=12, num_experts=8, experts_per_token=2,
    init_std=0.3, norm_eps=0.01, latent_norm_eps=0.02, rope_theta=100.0,
)  # fmt: skip
D, H, C, P, V, R, Q = 16, 3, 5, 4, 7, 6, 9


def with_choices(**choices):
    return dataclasses.replace(CONFIG, **choices)


def attention(dtype=torch.float64, **choices):
    return uneven_norms(LatentAttention(with_choices(**choices))).to(dtype)


# ---- The layer ----


def normalized(x, norm):
    return x / (x.square().mean() + CONFIG.latent_norm_eps).sqrt() * norm.weight


def rotated(x, position):
    """A rotation is a complex multiplication of channels i and i + P/2."""
    angles = torch.tensor([position * CONFIG.rope_theta ** (-2 * i / P) for i in range(P // 2)], dtype=torch.float64)
    pairs = torch.complex(x[: P // 2], x[P // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag])


def oracle(layer: LatentAttention, x_BSD: torch.Tensor) -> torch.Tensor:
    """A loop over sequences, positions and heads."""
    ups = layer.kv_up.weight.view(H, C + V, R)
    rows = []
    for x_SD in x_BSD:
        latents, shared, queries = [], [], []
        for s, x in enumerate(x_SD):
            down = torch.einsum("od,d->o", layer.down.weight, x)
            if layer.bias is not None:  # latents have one, and queries without a latent have none
                down = down + torch.cat([down.new_zeros(len(down) - len(layer.bias)), layer.bias])
            q = down[: -R - P]
            if layer.q_width == Q:
                q = torch.einsum("oq,q->o", layer.q_up.weight, normalized(q, layer.q_norm))
            queries.append(q.view(H, C + P))
            latents.append(normalized(down[-R - P : -P], layer.kv_norm))
            shared.append(rotated(down[-P:], s))
        for s in range(len(x_SD)):
            values = []
            for h in range(H):
                q, q_rotated = queries[s][h, :C], rotated(queries[s][h, C:], s)
                scores = torch.stack(
                    [(q @ ups[h, :C] @ latents[t] + q_rotated @ shared[t]) / math.sqrt(C + P) for t in range(s + 1)]
                )
                values.append(sum(p * (ups[h, C:] @ latents[t]) for t, p in enumerate(scores.softmax(0))))
            rows.append(layer.out.weight @ torch.cat(values))
    return torch.stack(rows).view_as(x_BSD)


@pytest.mark.parametrize("qkv_bias", [False, True])
@pytest.mark.parametrize("q_rank", [0, Q])
def test_latent_attention_equals_a_loop(q_rank, qkv_bias):
    layer = attention(q_rank=q_rank, qkv_bias=qkv_bias)
    for bias in [layer.bias] * qkv_bias:
        bias.detach().copy_(torch.linspace(-1, 1, len(bias)))
    x = torch.randn(2, 7, D, dtype=torch.float64)
    torch.testing.assert_close(layer(x), oracle(layer, x), atol=1e-12, rtol=1e-12)


# ---- With a cache ----


@pytest.mark.parametrize("q_rank,sequences,room", [(0, 1, 3), (Q, 3, 3), (0, 3, 256)])  # with 3, the cache grows
def test_absorbed_attention_equals_expanded_attention(monkeypatch, q_rank, sequences, room):
    monkeypatch.setattr(KVCache, "STEP", room)
    model = uneven_norms(build_model(with_choices(q_rank=q_rank)))
    check_that_a_cached_forward_is_the_forward(model, sequences)
