"""Multi-head latent attention against a loop, with a cache, and in a model."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from moe_dualpipe.expert_parallel import Loopback
from moe_dualpipe.kernels.weight_grads import WeightGrads, bind
from moe_dualpipe.models import (
    KVCache,
    ModelConfig,
    StageOptions,
    build_model,
    filled_cache,
    next_token_loss,
)
from moe_dualpipe.models.attention import Attention
from moe_dualpipe.models.latent_attention import LatentAttention
from tests.support.caches import (
    check_that_a_cached_forward_is_the_forward,
    check_that_a_filled_cache_works_as_a_past,
    piecewise,
)
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


@pytest.mark.parametrize("q_rank", [0, Q])
def test_latent_attention_equals_a_loop(q_rank):
    layer = attention(q_rank=q_rank)
    x = torch.randn(2, 7, D, dtype=torch.float64)
    torch.testing.assert_close(layer(x), oracle(layer, x), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("q_rank", [0, 4])
def test_gradients_against_finite_differences(q_rank):
    sizes = {"hidden_size": 4, "num_heads": 2, "head_dim": 2, "kv_rank": 3, "rope_dim": 2, "value_dim": 1}
    layer = attention(q_rank=q_rank, **sizes)
    names = [name for name, _ in layer.named_parameters()]

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, *layer.parameters()))


def test_latent_attention_is_causal():
    layer, x = attention(), torch.randn(1, 9, D, dtype=torch.float64)
    changed = x.clone()
    changed[:, 5:] += 1
    torch.testing.assert_close(layer(x)[:, :5], layer(changed)[:, :5])
    assert not torch.allclose(layer(x)[:, 5:], layer(changed)[:, 5:])


def test_angles_are_fp32_in_a_bf16_model():
    layer = attention(torch.bfloat16)
    x = torch.randn(1, 1000, D).bfloat16()
    exact = attention(torch.float32)
    exact.load_state_dict(layer.state_dict())
    assert (layer(x).float() - exact(x.float())).norm() / exact(x.float()).norm() < 0.02


# ---- With a cache ----


@pytest.mark.parametrize("room", [3, 256])  # the cache grows during the test only with 3
@pytest.mark.parametrize("sequences", [1, 3])
@pytest.mark.parametrize("q_rank", [0, Q])
def test_absorbed_attention_equals_expanded_attention(monkeypatch, q_rank, sequences, room):
    monkeypatch.setattr(KVCache, "STEP", room)
    model = uneven_norms(build_model(with_choices(q_rank=q_rank)))
    check_that_a_cached_forward_is_the_forward(model, sequences)


def test_absorbed_attention_in_bf16_is_close_to_fp32():
    layer, exact = attention(torch.bfloat16), attention(torch.float32)
    exact.load_state_dict(layer.state_dict())
    x = torch.randn(2, 40, D).bfloat16()
    cache, expected = KVCache(), exact(x.float())
    outputs = []
    for size in [30, 1, 9]:
        outputs.append(piecewise(layer, x[:, cache.length : cache.length + size], size, cache))
        cache.length += size
    assert (torch.cat(outputs, dim=1) - expected).norm() / expected.norm() < 0.02


@torch.no_grad()
def test_a_cache_holds_only_latents_and_shared_keys():
    layer, x, cache = attention(), torch.randn(2, 5, D, dtype=torch.float64), KVCache()
    layer(x, cache)
    cache.length = 5
    nothing = x.new_empty(2, 1, 0, R + P)
    (stored,) = cache.append(0, nothing)
    assert stored.shape == (2, 1, 5, R + P)
    down = x @ layer.down.weight[-R - P :].T
    for b in range(2):
        for s in range(5):
            expected = torch.cat([normalized(down[b, s, :R], layer.kv_norm), rotated(down[b, s, R:], s)])
            torch.testing.assert_close(stored[b, 0, s], expected)


@pytest.mark.parametrize("length", [0, 5, 300])
def test_a_filled_cache_works_as_a_past(length):
    check_that_a_filled_cache_works_as_a_past(CONFIG, length)


def test_a_cache_of_other_attention_is_refused():
    other = with_choices(attention="gqa", num_kv_heads=3, head_dim=10)
    model, cache = build_model(CONFIG), filled_cache(other, range(3), 2, 5)
    with torch.no_grad(), pytest.raises(ValueError, match=r"of \[2, 3, 10\] \(.*\): got \[2, 1, 10\]"):
        model(torch.zeros(2, 1, dtype=torch.int64), cache=cache)


# ---- In a model ----


def test_the_configuration_selects_it_and_reaches_every_layer():
    model = build_model(with_choices(norm_eps=0.5, latent_norm_eps=0.25, rope_theta=7.0, hidden_size=64, kv_rank=60))
    layers = [m for m in model.modules() if isinstance(m, LatentAttention)]
    assert [layer.layer for layer in layers] == [0, 1, 2]
    assert {layer.rotary.config.rope_theta for layer in layers} == {7.0}
    assert {norm.eps for norm in model.modules() if isinstance(norm, nn.RMSNorm)} == {0.5, 0.25}
    for name, parameter in model.named_parameters():
        if "attention." in name and parameter.ndim > 1:  # projections into the residual stream start smaller
            std = CONFIG.init_std / (6**0.5 if "out." in name else 1)
            assert parameter.std().item() == pytest.approx(std, rel=0.2), name
    plain = build_model(with_choices(attention="gqa", num_kv_heads=1, head_dim=4))
    assert [type(block.attention) for block in plain.layers.values()] == [Attention] * 3


@pytest.mark.parametrize("q_rank,more", [
    (0, {"down.weight": (H * (C + P) + R + P, D)}),
    (Q, {"down.weight": (Q + R + P, D), "q_norm.weight": (Q,), "q_up.weight": (H * (C + P), Q)}),
])  # fmt: skip
def test_names_and_shapes_of_its_weights_in_a_checkpoint(q_rank, more):
    state = {
        name.removeprefix("layers.2.attention."): tuple(tensor.shape)
        for name, tensor in build_model(with_choices(q_rank=q_rank)).state_dict().items()
        if name.startswith("layers.2.attention.")
    }
    always = {"kv_norm.weight": (R,), "kv_up.weight": (H * (C + V), R), "out.weight": (D, H * V)}
    assert state == always | more


def tokens(seed, length=5):
    return torch.randint(31, (2, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recompute", ["none", "norms", "attention", "full"])
def test_deferred_weight_gradients_equal_immediate_ones(recompute):
    model = build_model(CONFIG, options=StageOptions(recompute="none"))
    next_token_loss(model(tokens(1)), tokens(2)).backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    model, weight_grads = build_model(CONFIG, options=StageOptions(recompute=recompute)), WeightGrads()
    bind(model, weight_grads)
    with weight_grads.defer_to("later"):
        next_token_loss(model(tokens(1)), tokens(2)).backward()
    for name, parameter in model.get_submodule("layers.1.attention").named_parameters():
        assert (parameter.grad is None) == ("norm" not in name), name
    weight_grads.run_deferred("later")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, expected[name]), name


@pytest.mark.parametrize("q_rank", [0, Q])
@pytest.mark.quick("9")
def test_training_with_overlapped_pairs_is_bit_equal(q_rank):
    """Each step overlaps the forward of one batch with the backward of another."""
    runs = []
    for overlapped in (False, True):
        model, losses = build_model(with_choices(q_rank=q_rank), Loopback(8, 4), options=StageOptions(seed=3)), []
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
        for _ in range(12):
            loss1 = next_token_loss(model(tokens(1)), tokens(2))
            if overlapped:
                pair = model.overlapped_forward_backward
                loss0 = pair(model, [tokens(3)], next_token_loss, [tokens(4)], model, loss1, None, None)[1]
            else:
                loss0 = next_token_loss(model(tokens(3)), tokens(4))
                loss1.backward()
            loss0.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append((loss0.item(), loss1.item()))
        runs.append((losses, [p.detach() for p in model.parameters()]))
    (expected, parameters), (losses, ours) = runs
    assert losses == expected
    assert sum(losses[-1]) < 0.8 * sum(losses[0])
    assert all(torch.equal(a, b) for a, b in zip(ours, parameters, strict=True))
